"""With STANDIN_CUDA_DEVICES=N set, torch has N pretend CUDA devices in this process and its children."""

import os
import sys

if int(os.environ.get("STANDIN_CUDA_DEVICES") or 0):

    class _Before:
        """Runs the stand-in's parts just before the modules of torch that look for them."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name in ("torch.cuda", "torch.serialization", "torch.distributed.distributed_c10d"):
                import standin

                standin.before(name)
            return None

    sys.meta_path.insert(0, _Before)
