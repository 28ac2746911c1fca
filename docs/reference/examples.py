"""Examples of the commands, and of the public names whose docstrings have none; a test checks every call."""

EXAMPLES = {
    # --- training
    "init": "ctx = clusterddp.init(seed=1)",
    "Context": 'with clusterddp.init() as ctx:\n    print(f"rank {ctx.rank} of {ctx.world_size} on {ctx.device}")',
    "Context.is_main": 'if ctx.is_main:\n    torch.save(model.module.state_dict(), "model.pt")',
    "Context.run_dir": 'images = ctx.run_dir / "images" if ctx.run_dir else Path("images")',
    "Context.attempt": 'ctx.print(f"attempt {ctx.attempt}")',
    "Context.print": 'ctx.print(f"{len(dataset)} samples")',
    "Context.local_first": 'with ctx.local_first():\n    dataset = CIFAR10("data", download=True)',
    "Context.main_first": 'with ctx.main_first():\n    dataset = download("/shared/data")',
    "Context.wrap": "model = ctx.wrap(Net(), find_unused_parameters=True)",
    "Context.loader": "loader = ctx.loader(dataset, batch_size=64, num_workers=4)",
    "Context.eval_loader": "for images, labels in ctx.eval_loader(test_set, batch_size=256):\n    ...",
    "Context.run": "run = ctx.run(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, ema=ema)",
    "Context.unwatched": "with ctx.unwatched():\n    index = build_index(dataset)",
    "Context.all_reduce_sum": "correct = ctx.all_reduce_sum((predicted == labels).sum())",
    "Context.all_reduce_mean": "accuracy = ctx.all_reduce_mean(correct / count, weight=count)",
    "Context.gather": "predictions = ctx.gather(predicted)",
    "Run": 'ctx.print(f"continues at step {run.step}")',
    "Run.step": "if run.step % 100 == 0:\n    ctx.print(loss.item())",
    "Run.epoch": 'optimizer.param_groups[0]["lr"] = 0.1 * 0.9**run.epoch',
    "Run.end_of_epoch": "if run.end_of_epoch:\n    scheduler.step()",
    "Run.at_start_of_epoch": 'if run.at_start_of_epoch:\n    ctx.print(f"epoch {run.epoch}")',
    "Run.every": "if run.every(epochs=1):  # before the step's training\n    scheduler.step(evaluate(model))",
    "Run.steps": "for images, labels in run.steps(20_000):\n    ...",
    "Run.epochs": "for images, labels in run.epochs(90):\n    ...",
    "Run.micro": "for images, labels in run.micro(batch):\n    F.cross_entropy(model(images), labels).backward()",
    "Run.log": "run.log(loss=loss, lr=scheduler.get_last_lr()[0])",
    "Run.finish": "if loss < 0.01:  # the same value on all ranks\n    run.finish()",
    "Run.stop": 'if clusterddp.stop_requested():\n    run.stop("in the evaluation")',
    # --- loaders
    "Loader": "loader = ctx.loader(dataset, batch_size=64)",
    "Loader.label": "ctx.print(loader.label)",
    "Loader.share": 'ctx.print(f"{loader.share} samples per rank and step")',
    "Loader.workers": 'ctx.print(f"{loader.workers} workers per rank")',
    "Loader.epoch": "first = loader.epoch(0)",
    "Loader.ends_epoch": "if loader.ends_epoch(run.step):\n    scheduler.step()",
    "Loader.steps_in": "scheduler = OneCycleLR(optimizer, 0.1, total_steps=loader.steps_in(90))",
    "EvalLoader": "test_loader = ctx.eval_loader(test_set, batch_size=256)",
    # --- checkpoints
    "CheckpointFolder": (
        'with clusterddp.CheckpointFolder("checkpoints", keep=5) as folder:\n'
        "    for step in range(folder.restore(model=model), 10_000):\n"
        "        train(step)\n"
        "        if (step + 1) % 500 == 0:\n"
        "            folder.save(step + 1, model=model)"
    ),
    "CheckpointFolder.restore": "first_step = folder.restore(model=model, optimizer=optimizer)",
    "CheckpointFolder.save": "folder.save(step + 1, model=model, optimizer=optimizer)",
    "CheckpointFolder.wait": "folder.wait()",
    "CheckpointFolder.close": "folder.close()",
    "Checkpointing": 'ctx = clusterddp.init(run_dir="runs/a", checkpoint=clusterddp.Checkpointing(every_steps=500))',
    "Keep": 'folder = clusterddp.CheckpointFolder("checkpoints", keep=clusterddp.Keep(last=2, every=10_000))',
    # --- launching
    "Handle.status": "print(handle.status())",
    "Handle.wait": 'if handle.wait() == "completed":\n    ...',
    "Handle.logs": "print(handle.logs(rank=3))",
    "Handle.cancel": "handle.cancel()",
    "Handle.result": "accuracy = handle.result()",
    "Status": "print(handle.status().step)",
    # --- commands
    "submit": (
        "clusterddp submit train.py --nodes 2 --gpus 8 -p gpu -t 1-0 -- --lr 0.1\n"
        "clusterddp submit train.py --local --device cpu --gpus 2"
    ),
    "config show": "clusterddp config show jobs/digits.yaml --origin --nodes 4",
    "config validate": "clusterddp config validate jobs/*.yaml .clusterddp/config.yaml",
    "config presets": "clusterddp config presets\nclusterddp config presets timm",
    "config sites": "clusterddp config sites lumi",
    "config schema": "clusterddp config schema",
    "list": "clusterddp list --show loss --state running,pending",
    "status": "clusterddp status runs/train-0",
    "logs": (
        "clusterddp logs runs/train-0 -f --rank 3\nclusterddp logs runs/train-0 --rank 0,4-7 --attempt all --grep Error"
    ),
    "report": "clusterddp report runs/train-0 -o report.html",
    "rehearse": "clusterddp rehearse job.yaml\nclusterddp rehearse train.py --only step,save,kill -- --epochs 2\n"
    "clusterddp rehearse train.py -p gpu -N 2\nclusterddp rehearse -p gpu",
    "doctor": "clusterddp doctor\nclusterddp doctor --nodes 2 -p gpu\nclusterddp doctor --failed-nodes",
    "export": "clusterddp export runs/train-0 model.safetensors",
    "wait": "clusterddp wait runs/train-0 runs/train-1 --timeout 2h\nclusterddp wait --resubmit runs/train-0",
    "cancel": "clusterddp cancel runs/train-0\nclusterddp cancel 'runs/lr-*' --yes",
    "prune": "clusterddp prune runs --keep-checkpoints 2 --logs",
    "stacks": "clusterddp stacks runs/train-0 --rank 0,8-15",
    "stop": "clusterddp stop runs/train-0",
    "save": "clusterddp save runs/train-0",
    "drain": "clusterddp drain runs/train-0 n3",
    "requeue": "clusterddp requeue runs/train-0 --exclude n3",
    "shell": "clusterddp shell runs/train-0 --rank 3\nclusterddp shell runs/train-0 --rank 3 -- nvidia-smi",
}
