"""A frozen model: the weights and the names of another one, none of them trained."""

import pytest

from megaloom.dsl import fingerprint, flops, freeze, graph, lora, params
from megaloom.dsl.catalog import find
from megaloom.dsl.files.model_file import model_from_json, model_to_json
from megaloom.planner import Precision, Workload, cluster, plan


@pytest.mark.parametrize("adapted", [False, True])
def test_it_has_the_weights_of_the_model_and_trains_none(adapted: bool) -> None:
    base = lora(find("gpt2")[0], 4) if adapted else find("gpt2")[0]
    m = freeze(base)
    assert (params(m, trained=True), params(m)) == (0, params(base))
    assert [n.name for n in graph(m).nodes] == [n.name for n in graph(base).nodes]
    shapes = [{name: slot.dims for name, slot in graph(x).weights.items()} for x in (m, base)]
    assert shapes[0] == shapes[1]
    ours, theirs = flops(m, batch=1, seq=8), flops(base, batch=1, seq=8)
    assert (ours.forward, ours.wgrad) == (theirs.forward, 0)
    assert freeze(m).outputs == m.outputs


def test_its_file_and_its_plan() -> None:
    base = find("gpt2")[0]
    m = freeze(base)
    assert fingerprint(m) != fingerprint(base)
    assert fingerprint(model_from_json(model_to_json(m), "model.json")) == fingerprint(m)
    work = Workload(seq=128, batch=4, precision=Precision.BF16)
    best = plan(m, cluster("1xH100"), work, ref="gpt2", fixed={"vocab_multiple": 1}).best
    (nbytes,) = best.predicted.nbytes
    assert (nbytes["weights"], nbytes["gradients"], nbytes["optimizer"]) == (2 * params(m), 0, 0)
    assert best.reasons[1] == "All of the step is computation."
