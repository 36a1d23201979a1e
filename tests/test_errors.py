"""Errors: one paragraph, also if a loader process passes them on with a traceback."""

import pytest
from torch.utils.data import DataLoader, Dataset

from layershuffle.errors import DataError, LayerShuffleError, UsageError


class Broken(Dataset):
    """Two images that cannot be read."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise DataError("cannot read image", place=f"{index}.png", hint="repair the file")


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_loader_processes_are_one_paragraph(workers):
    with pytest.raises(DataError) as caught:
        list(DataLoader(Broken(), num_workers=workers))
    assert str(caught.value) == "cannot read image. Where: 0.png. Next: repair the file."


def test_questions_keep_their_mark():
    error = LayerShuffleError("no key 'a', did you mean 'b'?", hint="is it 'c'?")
    assert str(error) == "no key 'a', did you mean 'b'? Next: is it 'c'?"
    assert str(UsageError("wrong.", hint="mend it.")) == "wrong. Next: mend it."


def test_a_long_cause_loses_its_middle():
    error = DataError("the column holds " + "QUJD" * 3000 + ", which is no path", place="a.csv")
    assert error.cause.startswith("the column holds QUJD")
    assert error.cause.endswith("QUJD, which is no path")
    assert len(str(error)) == 400 + len(" ... . Where: a.csv.")
