from dataplane.bulk.stops import STOPS_KEPT, StoppedPuts


def test_puts_are_told_apart_by_session_and_number():
    stops = StoppedPuts()
    assert not stops.covers(1, 5)
    stops.stop(1, 5)
    stops.stop(1, 5)
    assert [stops.covers(1, number) for number in (4, 5, 6)] == [False, True, False]
    assert not stops.covers(2, 5)
    assert len(stops) == 1


def test_what_is_forgotten_stays_stopped():
    stops = StoppedPuts()
    numbers = range(10, 10 * (3 * STOPS_KEPT + 1), 10)
    for number in numbers:
        stops.stop(1, number)
    assert len(stops) <= STOPS_KEPT + 1
    assert all(stops.covers(1, number) for number in numbers)
    newest = numbers[-1]
    assert not stops.covers(1, newest - 1), "a put between those that are told apart goes on"
    assert not stops.covers(1, newest + 1)
    stops.stop(1, 10)
    assert stops.covers(1, newest)


def test_a_fenced_session_is_forgotten_alone():
    stops = StoppedPuts()
    for session in (1, 2):
        stops.stop(session, 5)
    stops.forget(1)
    stops.forget(1)
    assert (stops.covers(1, 5), stops.covers(2, 5), len(stops)) == (False, True, 1)
