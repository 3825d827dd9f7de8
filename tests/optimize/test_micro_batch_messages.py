"""What is news is told once."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

from lightning_speedkit.optimize.micro_batch_messages import Messages


def test_each_piece_of_news_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    messages, module = Messages(), nn.Sequential(nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size, one_by_one in ((None, False), (4, False), (4, False), (2, True), (2, True)):
            messages.tell(size, one_by_one, module)
        messages.knows_size(None)  # another run
        messages.tell(2, True, nn.Identity())
    texts = [str(one.message) for one in told]
    assert [text.split(".")[0] for text in texts] == [
        "Memory ran out",
        "An optimizer step ran out of memory and was repeated; from now on steps go parameter by parameter where the "
        "optimizer has the option (foreach=False, not fused), which needs less memory",
        "Memory ran out",
    ]
    assert ["BatchNorm" in text for text in texts] == [True, False, False]
    assert ["at most 4" in texts[0], "at most 2" in texts[2]] == [True, True]


def test_a_size_from_a_checkpoint_is_no_news(recwarn: pytest.WarningsRecorder) -> None:
    messages = Messages()
    messages.knows_size(4)
    messages.tell(4, False, nn.Identity())
    assert not list(recwarn)


@pytest.mark.parametrize("counts_samples", [True, False])
def test_where_samples_are_counted_it_names_the_count_of_labels(counts_samples: bool) -> None:
    with pytest.warns(UserWarning, match="Memory ran out") as told:
        Messages(counts_samples).tell(4, False, nn.Identity())
    assert ("pass count='labels'" in str(told[0].message)) is counts_samples
