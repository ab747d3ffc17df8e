"""The timeline of native sums, in Chrome's trace format."""

from ringtrain.collectives.native.backend import draw_timeline


def test_each_sum_is_drawn_with_the_wait_before_it() -> None:
    """Rank 1 came a millisecond later, for which rank 0 has waited."""
    sums = [
        [["gradients/0", 4096, 1_000_000, 2_000_000, 2_500_000]],
        [["gradients/0", 4096, 2_000_000, 2_000_000, 2_400_000]],
    ]
    events = draw_timeline(sums)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    spans = [(e["pid"], e["name"], e["ts"], e["dur"], e["args"]["bytes"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, "wait", 1000.0, 1000.0, 4096),
        (0, "gradients/0", 2000.0, 500.0, 4096),
        (1, "wait", 2000.0, 0.0, 4096),
        (1, "gradients/0", 2000.0, 400.0, 4096),
    ]
