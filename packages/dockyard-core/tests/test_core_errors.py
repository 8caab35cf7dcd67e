from __future__ import annotations

import pickle

import pytest

from dockyard_core import errors

TREE = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.DockyardError)]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_survives_the_way_between_processes(kind: type[errors.DockyardError]) -> None:
    if issubclass(kind, errors.RefitError):
        error: errors.DockyardError = kind("rank 2 is late", wanted_version=7, held_version=6)
    else:
        error = kind("rank 2 is late")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
