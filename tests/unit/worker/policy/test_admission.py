from services.worker.policy.admission import AdmissionView, admits


def view(free: int, running: int = 1, block_count: int = 100, max_running: int = 4) -> AdmissionView:
    return AdmissionView(block_count, free, running, max_running)


def test_all_needed_blocks_must_be_free() -> None:
    assert admits(view(free=10), 10, 0.0)
    assert not admits(view(free=9), 10, 0.0)


def test_a_reserve_stays_free_for_running_requests() -> None:
    assert admits(view(free=15), 10, 0.05)
    assert not admits(view(free=14), 10, 0.05)


def test_an_idle_instance_offers_all_blocks() -> None:
    assert admits(view(free=100, running=0), 100, 0.05)


def test_no_more_requests_than_the_maximum_run() -> None:
    assert admits(view(free=100, running=3), 1, 0.0)
    assert not admits(view(free=100, running=4), 1, 0.0)
