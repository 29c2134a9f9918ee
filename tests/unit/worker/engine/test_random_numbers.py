import numpy as np

from services.worker.engine.random_numbers import philox, uniforms


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], np.uint64) for value in values)


def test_philox_gives_the_known_answers() -> None:
    # From the authors' Random123 library; counters and keys of zeros, of ones, and of digits of pi.
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, answer in cases:
        c0, c1, c2, c3 = words(*counter)
        k0, k1 = words(*key)
        assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == answer


def test_a_number_depends_on_its_seed_and_position_alone() -> None:
    seeds, positions = np.array([5, -3, 2**63 - 1]), np.array([0, 7, 2**40])
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone


def test_numbers_are_uniform_and_uncorrelated() -> None:
    along = uniforms(np.full(20_000, 42), np.arange(20_000))
    across = uniforms(np.arange(20_000), np.full(20_000, 42))
    for numbers in (along, across):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 100  # chi-square with 49 degrees of freedom: p about 2e-5
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
