"""Factors of a cluster that measured runs can tell: each multiplies the time of one kind of work.

A factor is 1 where a cluster is as its preset says, and 1.1 where that work takes 10 % longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

from attrs import evolve, frozen

from megaloom.planner.contract.devices import Cluster, Link


@frozen(kw_only=True)
class Factor:
    """A factor: how it changes a cluster, and what is believed of it before any run is seen.

    prior: standard deviation of its logarithm. least: the smallest value that the figures of a cluster allow, since no
    efficiency exceeds 1. axes: fields of a layout that change the share of the step that it multiplies.
    """

    name: str
    prior: float
    scaled: Callable[[Cluster, float], Cluster]
    least: Callable[[Cluster], float]
    axes: tuple[str, ...]


def _slower(link: Link, factor: float) -> Link:
    return evolve(link, efficiency=link.efficiency / factor)


def _products(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    products, attention = device.flops_efficiency / factor, device.attend_efficiency / factor
    return evolve(cluster, device=evolve(device, flops_efficiency=products, attend_efficiency=attention))


def _host(cluster: Cluster, factor: float) -> Cluster:
    return evolve(cluster, device=evolve(cluster.device, launch_seconds=cluster.device.launch_seconds * factor))


# The priors were chosen on one half of the groups of published runs (docs/accuracy/calibration.md), from a few:
# products 0.06, 0.08 and 0.12, the others 0.15, log 1.3 and 0.4. Left-out errors depend little on them.
PRODUCTS_PRIOR, OTHERS_PRIOR = 0.12, log(1.3)
LEAST_LAUNCH = 0.1  # of the launch time; no host is ten times as fast
FACTORS = (
    Factor(
        name="matrix products and attention",
        prior=PRODUCTS_PRIOR,
        scaled=_products,
        least=lambda c: max(c.device.flops_efficiency, c.device.attend_efficiency),
        axes=("micro_batch", "tp"),
    ),
    Factor(
        name="fabric within a node",
        prior=OTHERS_PRIOR,
        scaled=lambda c, factor: evolve(c, intra=_slower(c.intra, factor)),
        least=lambda c: c.intra.efficiency,
        axes=("tp", "cp", "ep"),
    ),
    Factor(
        name="fabric between nodes",
        prior=OTHERS_PRIOR,
        scaled=lambda c, factor: evolve(c, inter=_slower(c.inter, factor)),
        least=lambda c: c.inter.efficiency,
        axes=("dp", "pp", "ep"),
    ),
    Factor(
        name="launches by the host",
        prior=OTHERS_PRIOR,
        scaled=_host,
        least=lambda c: LEAST_LAUNCH,
        axes=("micro_batch", "tp"),
    ),
)


def scaled(cluster: Cluster, values: Sequence[float]) -> Cluster:
    """Return a cluster with these values of all factors, in the order of FACTORS."""
    for factor, value in zip(FACTORS, values, strict=True):
        if value != 1.0:
            cluster = factor.scaled(cluster, float(value))
    return cluster
