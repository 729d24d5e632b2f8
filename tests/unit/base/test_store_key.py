"""A store key keeps its secret, and says the same of the same bytes everywhere."""

from __future__ import annotations

import pickle

import pytest

from stepwell import ConfigError
from stepwell.base.config import StoreConfig
from stepwell.base.store_key import StoreKey

SECRET = bytes(range(32))


def test_the_same_secret_makes_the_same_key_also_in_another_process() -> None:
    key, same = StoreKey(SECRET), pickle.loads(pickle.dumps(StoreKey(SECRET)))
    assert (key.id, key.mac(b"x"), key.space(b"y")) == (same.id, same.mac(b"x"), same.space(b"y"))
    assert key.mac(b"x").hex() == "2e89373420cf19125b083e652af7f1bd", "values of earlier servers must stay readable"


def test_another_secret_another_message_or_another_purpose_gives_other_bytes() -> None:
    key, other = StoreKey(SECRET), StoreKey(SECRET + b"!")
    said = {key.mac(b"x"), key.mac(b"y"), other.mac(b"x"), key.space(b"x")[:16], other.space(b"x")[:16], key.id, other.id}
    assert len(said) == 7


def test_what_is_printed_shows_nothing_of_the_secret() -> None:
    key = StoreKey(SECRET)
    for shown in (repr(key), str(key), repr(StoreConfig(key=key))):
        assert key.id.hex() in shown and SECRET.hex()[:8] not in shown and repr(SECRET)[2:10] not in shown
        assert key._root.hex()[:8] not in shown


@pytest.mark.parametrize("secret", [b"", SECRET[:31], bytes(32), b"password" * 4, b"ab" * 100])
def test_a_secret_that_can_be_guessed_is_refused(secret: bytes) -> None:
    with pytest.raises(ConfigError, match=r"at least 32 random bytes|must be random"):
        StoreKey(secret)
