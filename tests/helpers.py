"""What the tests share: the backends to run, input makers, the two-error rule."""

from __future__ import annotations

from specdec_kernels.dispatch import why_unavailable

BACKENDS = [b for b in ("reference", "cpu") if why_unavailable(b, "cpu") is None]
