"""Tests for samplers: is what comes out of speculative decoding what the target would have said?

    from specdec_kernels.testing import check_sampler

    def verify(target_logits, draft_token_ids, parents, num_nodes, sampling, *, draft_logits=None):
        ...  # a sampler of your own, which returns an Acceptance

    report = check_sampler(verify, rule="token")  # seeded=False if it keeps random state
    print(report)
    assert report.passed

Everything here needs torch alone. `docs/testing.md` says what each check sees.
`python -m specdec_kernels.testing --controls` shows that each fault it is meant to see fails it.
"""

from specdec_kernels.testing.checks import FILTERS, WINDOWS, check_sampler, toy_models
from specdec_kernels.testing.controls import NEGATIVE_CONTROLS, Control
from specdec_kernels.testing.decoder import (
    Decoder,
    Drafts,
    InvalidAcceptance,
    check_acceptance,
    gumbel_draws,
)
from specdec_kernels.testing.exact import exact_law, exact_laws, step_joint, step_law
from specdec_kernels.testing.models import LogitDrift, NearTies, logit_drift, near_ties
from specdec_kernels.testing.plain import plain_verify
from specdec_kernels.testing.report import Check, Report
from specdec_kernels.testing.statistics import (
    FALSE_ALARM,
    chi_square_pvalue,
    count_cells,
    pair_marginals,
    total_variation,
)
from specdec_kernels.testing.toy import Filters, ToyModel, conditionals, exact_joint, processed

__all__ = [
    "FALSE_ALARM",
    "FILTERS",
    "NEGATIVE_CONTROLS",
    "WINDOWS",
    "Check",
    "Control",
    "Decoder",
    "Drafts",
    "Filters",
    "InvalidAcceptance",
    "LogitDrift",
    "NearTies",
    "Report",
    "ToyModel",
    "check_acceptance",
    "check_sampler",
    "chi_square_pvalue",
    "conditionals",
    "count_cells",
    "exact_joint",
    "exact_law",
    "exact_laws",
    "gumbel_draws",
    "logit_drift",
    "near_ties",
    "pair_marginals",
    "plain_verify",
    "processed",
    "step_joint",
    "step_law",
    "total_variation",
    "toy_models",
]
