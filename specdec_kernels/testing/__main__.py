"""`python -m specdec_kernels.testing`: the suite on this package's own sampler."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.testing.checks import ROWS, WINDOWS_OF_RULE, check_sampler
from specdec_kernels.testing.controls import NEGATIVE_CONTROLS
from specdec_kernels.testing.plain import plain_verify


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec_kernels.testing", description=__doc__)
    rules = [rule for rule in WINDOWS_OF_RULE if rule]
    parser.add_argument("--rule", choices=rules, help="default: all of them")
    parser.add_argument(
        "--backend", help="of rejection_sample, or plain: the verifier that the controls spoil"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help=f"default: {ROWS}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--controls", action="store_true", help="the negative controls instead: all must fail"
    )
    options = parser.parse_args(arguments)
    if options.controls:
        return run_controls(options.rows)
    sound = True
    for rule in [options.rule] if options.rule else rules:
        verify = partial(rejection_sample, rule=rule, backend=options.backend)
        if options.backend == "plain":
            verify = partial(plain_verify, rule=rule)
        report = check_sampler(verify, rule=rule, rows=options.rows, device=options.device)
        sound &= report.passed
        print(f"rule {rule}\n{report}\n")
    return 0 if sound else 1


def run_controls(rows: int) -> int:
    caught = True
    for name, control in NEGATIVE_CONTROLS.items():
        report = control.run(rows)
        caught &= not report.passed
        print(f"{name}: {control.fault}\n{report}\n")
    print("every control fails, as it must" if caught else "a control was not seen")
    return 0 if caught else 1


if __name__ == "__main__":
    sys.exit(main())
