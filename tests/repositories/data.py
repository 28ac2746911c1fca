"""Small synthetic data in the formats that the repositories read."""

from __future__ import annotations

import json
import pickle
import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np


def images(folder: Path) -> None:
    """``train/CLASS/N.jpg`` and ``val/CLASS/N.jpg``, as ImageNet's: the two classes differ by colour."""
    for split, number in (("train", 24), ("val", 8)):
        for label in range(2):
            target = folder / split / f"class{label}"
            target.mkdir(parents=True)
            for i in range(number):
                _picture(label, seed=i).save(target / f"{i}.jpg")


def named_images(folder: Path) -> None:
    """``BREED_N.jpg`` in one folder, as the Oxford-IIIT Pet Dataset's."""
    folder.mkdir(parents=True)
    for label, breed in enumerate(("Beagle", "Sphynx")):
        for i in range(40):
            _picture(label, seed=i).save(folder / f"{breed}_{i}.jpg")


def tokens(folder: Path) -> None:
    """``train.bin`` and ``val.bin``: tokens of two bytes, of a vocabulary of 50 that ``meta.pkl`` names."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        (np.cumsum(rng.integers(0, 3, 20_000)) % 50).astype(np.uint16).tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50}))


def boxes(folder: Path) -> None:
    """Images with a bright square each, its box in a text file beside them, and ``data.yaml``, as yolov5 reads them."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, number in (("train", 16), ("val", 4)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for i in range(number):
            pixels = rng.integers(0, 80, (64, 64, 3), dtype=np.uint8)
            x, y = (int(v) for v in rng.integers(0, 40, 2))
            pixels[y : y + 24, x : x + 24] = 230
            Image.fromarray(pixels).save(folder / "images" / split / f"{i}.jpg")
            box = f"0 {(x + 12) / 64} {(y + 12) / 64} {24 / 64} {24 / 64}\n"
            (folder / "labels" / split / f"{i}.txt").write_text(box)
    lines = [f"path: {folder}", "train: images/train", "val: images/val", "nc: 1", "names: [square]"]
    (folder / "data.yaml").write_text("\n".join(lines) + "\n")


def text(folder: Path) -> None:
    """``train.txt``, ``val.txt``, and a tokenizer of words and a tiny GPT-2's configuration for transformers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(64)]
    for split, number in (("train", 300), ("val", 40)):
        rows = [np.cumsum(rng.integers(0, 3, 40)) % 64 for _ in range(number)]
        (folder / f"{split}.txt").write_text("".join(" ".join(words[i] for i in row) + "\n" for row in rows))
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "model").mkdir()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 32}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(named))
    shape = {"vocab_size": 65, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2", **shape}))


def captions(folder: Path) -> None:
    """Images whose captions name their class and number in ``train.csv``, and a tiny CLIP model's description."""
    named_images(folder / "images")
    rows = ["filepath\ttitle"]
    for path in sorted((folder / "images").iterdir())[:64]:
        rows.append(f"{path}\ta photo of a {path.stem.replace('_', ' number ')}")
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    text_tower = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
    described = {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text_tower}
    (folder / "tiny.json").write_text(json.dumps(described))


def imagenet_entries(folder: Path) -> None:
    """Images with the list of them that DINOv2 reads, its configuration, and xFormers' replacement."""
    rows = []
    for label in range(2):
        (folder / "train" / f"class{label}").mkdir(parents=True)
        for i in range(24):
            _picture(label, seed=i).save(folder / "train" / f"class{label}" / f"class{label}_{i}.JPEG")
            rows.append((i, label, f"class{label}", f"name{label}"))
    columns = [("actual_index", "<u4"), ("class_index", "<u4"), ("class_id", "U6"), ("class_name", "U5")]
    np.save(folder / "entries-TRAIN.npy", np.array(rows, dtype=columns))
    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    wrapped = {"sharding_strategy": "NO_SHARD", "mixed_precision": exact}
    parts = dict.fromkeys(("backbone", "dino_head", "ibot_head"), wrapped)
    described = {
        "compute_precision": {"grad_scaler": False, "teacher": parts, "student": parts},
        "dino": {"head_n_prototypes": 64, "head_bottleneck_dim": 16, "head_hidden_dim": 32},
        "train": {
            "dataset_path": f"ImageNet:split=TRAIN:root={folder}:extra={folder}",
            "batch_size_per_gpu": 4,
            "num_workers": 0,
            "OFFICIAL_EPOCH_LENGTH": 4,
        },
        "student": {"arch": "vit_small", "patch_size": 8},
        "teacher": {"warmup_teacher_temp_epochs": 2},
        "optim": {"epochs": 6, "warmup_epochs": 1},
        "crops": {"local_crops_number": 2, "global_crops_size": 32, "local_crops_size": 16},
        "evaluation": {"eval_period_iterations": 0},
    }
    (folder / "config.yaml").write_text(json.dumps(described))
    shutil.copytree(Path(__file__).with_name("xformers"), folder / "xformers")


def speech(folder: Path) -> None:
    """Tones of half a second as 16 kHz WAV files of 28 speakers with SpeechBrain's manifests, and noise to mix in."""
    folder.mkdir(parents=True)
    for split, number in (("train", 28), ("valid", 4), ("test", 4)):
        manifest = {}
        for i in range(number):
            path = folder / f"{split}{i}.wav"
            _write_wav(path, np.sin(np.arange(8000) * 0.02 * (i + 1)))
            manifest[f"{split}{i}"] = {"wav": str(path), "length": 0.5, "spk_id": f"speaker{i}"}
        (folder / f"{split}.json").write_text(json.dumps(manifest))
    (folder / "noise").mkdir()
    (folder / "noise" / "data.zip").touch()  # as if it had been downloaded
    for i in range(2):
        _write_wav(folder / "noise" / f"{i}.wav", np.random.default_rng(i).uniform(-0.5, 0.5, 16_000))


def nothing(folder: Path) -> None:
    """For scripts that make their own."""
    folder.mkdir(parents=True)


_ALL = (images, named_images, tokens, boxes, text, captions, imagenet_entries, speech, nothing)
MAKERS: dict[str, Callable[[Path], None]] = {maker.__name__: maker for maker in _ALL}


def _picture(label: int, seed: int):  # type: ignore[no-untyped-def]  # PIL is an extra package
    from PIL import Image

    pixels = np.random.default_rng([label, seed]).integers(0, 128, (64, 64, 3))
    pixels[..., label] += 100
    return Image.fromarray(pixels.astype(np.uint8))


def _write_wav(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 8000).astype("<i2").tobytes())
