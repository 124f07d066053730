"""Configurations are only compared with what the graph says."""

import copy

from kvpass import explain, models


def test_a_configuration_that_contradicts_the_graph_is_noted():
    """The layer's row keeps what the graph computes and says what the configuration claims."""
    model = models.tiny("qwen2_mixed")
    assert all("configuration" not in row.note for row in explain(model).rows)
    config = copy.copy(model.config)
    model.config = config
    config.num_key_value_heads, config.sliding_window = 4, 9  # after the modules were built
    first, second = explain(model).rows
    assert first.mask == "sliding(9)" or "window: 9 by the configuration" in first.note
    for row in (first, second):
        assert "2kv" in row.attention and "KV heads: 4 by the configuration" in row.note
