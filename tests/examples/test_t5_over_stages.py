"""The T5 of examples/scripts learns over four stages what it learns in one process."""

import pytest

from megaloom.examples.scripts.t5_over_stages import main


def test_four_stages_have_the_losses_of_one_process() -> None:
    curves = main()
    assert len(curves) == 30
    assert all(staged == pytest.approx(whole, abs=1e-5) for staged, whole in curves)
    assert curves[-1][0] < curves[0][0] - 1
