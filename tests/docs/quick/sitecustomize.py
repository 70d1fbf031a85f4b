"""With this folder on PYTHONPATH, DeepSpeed does not compile a collective for CPUs first, which takes minutes."""

import importlib.abc
import importlib.util
import sys


class _WithoutCollective(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "deepspeed.ops":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.__compatible_ops__["deepspeed_shm_comm"] = False

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _WithoutCollective())
