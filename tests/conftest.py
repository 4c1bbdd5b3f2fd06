import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

from specdec_kernels import native

sys.path.insert(0, str(Path(__file__).parent))

if native.triton_interprets:
    import triton_interpreter  # noqa: F401


def pytest_addoption(parser):
    parser.addoption(
        "--cuda-schedule",
        type=int,
        default=0,
        help="how emulated CUDA threads take turns: 0 forwards, 1 backwards, from 2 on at random",
    )


def pytest_configure(config):
    if hasattr(native.cuda, "set_schedule"):
        native.cuda.set_schedule(config.getoption("--cuda-schedule"))


def pytest_collection_modifyitems(config, items):
    if not native.cuda_is_emulated:
        return
    from emulated import is_left_out

    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_left_out(item)]


# `pytest -k fuzz --hypothesis-profile=nightly` takes an hour or so.
for name, examples in (("ci", 200), ("nightly", 5000)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=name == "ci",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
settings.load_profile("ci")
