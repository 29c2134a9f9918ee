"""`benchmarks.streamed`: what streaming an instance's layers from host memory would gain."""

from benchmarks.streamed import StreamingInstance, table
from sim.hardware import find_gpu, models


def test_streamed_layers_hide_behind_the_step_and_are_worth_their_slots() -> None:
    card = StreamingInstance(find_gpu("A100-40G", "this test"), models()["Qwen2.5-14B"])
    parts = card.best(0.25, 0.125)
    assert parts.net_layers > 0
    assert parts.step_s >= (parts.net_layers + 0.25) * card.layer_s
    alone = card.best(0.0, card.model.layer_count)
    assert alone.net_layers == 0 < alone.tokens_per_s < parts.tokens_per_s
    assert card.pair()[1] > parts.tokens_per_s / alone.tokens_per_s
    assert card.best(2.0, 1.0).net_layers == 0, (
        "over PCIe, streaming whole layers frees no more memory than its slots take"
    )


def test_the_table_has_a_row_for_each_case() -> None:
    assert len({line.count("|") for line in table().splitlines()}) == 1
