import logging
import sys

import pytest
import torch

logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models gain nothing from more, and waiting threads cost much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def unpatched():
    """A test that fails leaves no patched model behind."""
    yield
    hooks = sys.modules.get("specdec_kernels.hf.patch")
    if hooks is None:
        return
    hooks._engines.clear()
    hooks._uninstall_if_unused()
