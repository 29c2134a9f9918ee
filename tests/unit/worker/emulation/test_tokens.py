import random

from services.worker.emulation.tokens import answer, next_token, prefix_hash, wrong_token


def test_the_hash_of_a_prefix_does_not_depend_on_its_chunks() -> None:
    tokens = [random.Random(1).randrange(50_000) for _ in range(100)]
    for cut in (0, 1, 50, 99, 100):
        assert prefix_hash(tokens[cut:], prefix_hash(tokens[:cut])) == prefix_hash(tokens)


def test_an_answer_continues_where_it_was_interrupted() -> None:
    prompt = [3, 1, 4, 1, 5]
    whole = answer(prompt, 20, 1000)
    assert answer([*prompt, *whole[:7]], 13, 1000) == whole[7:]


def test_a_lost_or_repeated_token_changes_later_tokens() -> None:
    prompt = [3, 1, 4, 1, 5]
    whole = answer(prompt, 20, 1000)
    assert answer([*prompt, *whole[:6]], 13, 1000) != whole[7:]
    assert answer([*prompt, *whole[:7], whole[6]], 13, 1000) != whole[7:]


def test_tokens_are_spread_over_the_vocabulary() -> None:
    tokens = answer([1], 4000, 1000)
    assert all(0 <= token < 1000 for token in tokens)
    assert len(set(tokens)) > 900


def test_a_wrong_token_differs_from_the_right_one() -> None:
    assert all(wrong_token(token, 7) != token and 0 <= wrong_token(token, 7) < 7 for token in range(7))
    assert next_token(1, 2, 1000) != next_token(1, 3, 1000)
