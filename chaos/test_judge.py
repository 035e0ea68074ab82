"""Tests of the judge, with histories made by hand. `python3 -m unittest discover -s chaos`."""

import unittest

from judge import judge_jobs, judge_locks


def run(job, begun, ended, slot=None, instance="a"):
    return {"job": job, "slot": slot, "instance": instance, "begun": begun, "ended": ended}


def history(runs, faults=(), start=100, end=103, every=1, until=110):
    return {"jobs": [{"name": "j", "every": every}], "from": start, "to": end, "until": until,
            "runs": runs, "faults": list(faults)}


def fault(at, kind, instance=None):
    return {"at": at, "kind": kind, "instance": instance}


def on_time(*ticks):
    return [run("j", tick + 0.1, tick + 0.3) for tick in ticks]


class Ticks(unittest.TestCase):
    def test_nothing_is_wrong_with_a_run_for_each_tick(self):
        figures = judge_jobs(history(on_time(100, 101, 102)))
        self.assertEqual((figures["ticks"], figures["lost"]), (3, 0))
        self.assertEqual((figures["twice"], figures["beside"]), (0, 0))
        self.assertAlmostEqual(figures["longest"], 0.1)

    def test_a_tick_without_a_run_is_lost(self):
        figures = judge_jobs(history(on_time(100, 102)))
        self.assertEqual((figures["lost"], figures["lost_ticks"]), (1, [("j", 101)]))

    def test_a_tick_whose_only_run_has_no_end_is_lost(self):
        runs = on_time(100, 102) + [run("j", 101.1, None)]
        self.assertEqual(judge_jobs(history(runs))["lost"], 1)

    def test_a_second_run_saves_the_tick_and_its_begin_is_the_delay(self):
        runs = on_time(100, 102) + [run("j", 101.1, None, 101), run("j", 106, 106.2, 101)]
        figures = judge_jobs(history(runs, [fault(101.2, "kill", "a")]))
        self.assertEqual((figures["lost"], figures["twice"]), (0, 0))
        self.assertAlmostEqual(figures["longest"], 5)

    def test_the_tick_that_the_peer_tells_goes_before_the_time(self):
        runs = on_time(100, 102) + [run("j", 102.5, 102.7, 101)]
        figures = judge_jobs(history(runs))
        self.assertEqual((figures["lost"], figures["twice"]), (0, 0))

    def test_a_late_run_that_tells_no_tick_is_of_the_latest_tick(self):
        runs = on_time(100, 102) + [run("j", 102.5, 102.7)]
        figures = judge_jobs(history(runs))
        self.assertEqual((figures["lost"], figures["twice"]), (1, 1))

    def test_a_told_time_between_two_ticks_is_of_the_earlier_one(self):
        figures = judge_jobs(history([run("j", 100.7, 100.9, 100.65)], start=100, end=101))
        self.assertEqual(figures["lost"], 0)
        self.assertAlmostEqual(figures["longest"], 0.7)

    def test_each_further_end_is_one_more(self):
        runs = on_time(100, 101, 102) + [run("j", 105, 105.2, 101), run("j", 106, 106.2, 101)]
        self.assertEqual(judge_jobs(history(runs))["twice"], 2)

    def test_ticks_outside_the_time_do_not_count(self):
        figures = judge_jobs(history(on_time(98, 100, 101, 102, 103, 103)))
        self.assertEqual((figures["ticks"], figures["lost"], figures["twice"]), (3, 0, 0))

    def test_percentiles_are_those_of_the_ticks_that_ran(self):
        runs = [run("j", tick + (5 if tick == 199 else 0.5), tick + 9, tick)
                for tick in range(100, 200)]
        figures = judge_jobs(history(runs, end=200, until=220))
        self.assertEqual((figures["p50"], figures["p99"], figures["longest"]), (0.5, 0.5, 5))


class Beside(unittest.TestCase):
    def test_runs_that_overlap_are_beside_each_other(self):
        runs = on_time(100, 101, 102) + [run("j", 101.2, 101.4, 101)]
        self.assertEqual(judge_jobs(history(runs))["beside"], 1)

    def test_a_killed_run_ends_with_its_instance(self):
        runs = on_time(100, 102) + [run("j", 101.0, None, 101, "b"), run("j", 101.3, 101.5, 101)]
        killed_before = judge_jobs(history(runs, [fault(101.2, "kill", "b")]))
        killed_after = judge_jobs(history(runs, [fault(101.4, "kill", "b")]))
        self.assertEqual((killed_before["beside"], killed_after["beside"]), (0, 1))

    def test_a_stopped_run_goes_on_to_its_end(self):
        runs = on_time(100, 102) + [run("j", 101.0, 104, 101, "b"), run("j", 103, 103.2, 101)]
        figures = judge_jobs(history(runs))
        self.assertEqual((figures["beside"], figures["twice"]), (2, 1))

    def test_jobs_do_not_disturb_each_other(self):
        both = history(on_time(100, 101, 102) + [run("k", 100, 103)])
        both["jobs"].append({"name": "k", "every": 5})
        self.assertEqual(judge_jobs(both)["beside"], 0)


class Gaps(unittest.TestCase):
    def test_the_time_after_a_kill_is_that_in_which_a_run_is_owed(self):
        figures = judge_jobs(history(on_time(100, 102), [fault(100.5, "kill", "b")]))
        self.assertAlmostEqual(figures["after_kill"], 1.1)

    def test_a_run_before_the_next_tick_leaves_no_time(self):
        runs = on_time(100, 101, 102) + [run("j", 100.7, 100.9, 99)]
        self.assertEqual(judge_jobs(history(runs, [fault(100.5, "kill", "b")]))["after_kill"], 0)

    def test_after_a_restart_a_tick_of_the_outage_is_owed_at_once(self):
        faults = [fault(100.5, "server_down"), fault(101.5, "server_up")]
        with_tick = judge_jobs(history(on_time(100, 102), faults))
        without = judge_jobs(history(on_time(110), faults, start=100, end=111, every=10, until=120))
        self.assertAlmostEqual(with_tick["after_restart"], 0.6)
        self.assertAlmostEqual(without["after_restart"], 0.1)

    def test_a_kill_while_the_server_is_down_does_not_count(self):
        faults = [fault(100.5, "server_down"), fault(100.7, "kill", "b"), fault(101.5, "server_up")]
        figures = judge_jobs(history(on_time(100, 102), faults))
        self.assertIsNone(figures["after_kill"])
        self.assertAlmostEqual(figures["after_restart"], 0.6)

    def test_a_job_that_never_runs_again_is_silent_to_the_end(self):
        figures = judge_jobs(history(on_time(100), [fault(101, "kill", "b")]))
        self.assertEqual(figures["after_kill"], 9)


def worker(name, *holds):
    """Holds of (asked, got, left, value)."""
    events = []
    for asked, got, left, value in holds:
        events.append({"event": "ask", "at": asked})
        events.append({"event": "got", "at": got})
        if value is None:
            events.append({"event": "refused", "at": left})
        elif left is not None:
            events.append({"event": "done", "at": left, "value": value})
    return {"name": name, "events": events}


class Locks(unittest.TestCase):
    def test_holders_one_after_another_lose_nothing(self):
        workers = [worker("a", (0, 0, 1, 1), (1, 2, 3, 3)), worker("b", (0, 1, 2, 2))]
        part = judge_locks({"workers": workers, "split": 9})["pause"]
        self.assertEqual((part["done"], part["two_holders"], part["lost"]), (3, 0, 0))
        self.assertEqual(part["longest_wait"], 1)

    def test_a_value_that_two_wrote_is_a_lost_update(self):
        workers = [worker("a", (0, 0, 5, 1)), worker("b", (0, 2, 3, 1))]
        part = judge_locks({"workers": workers, "split": 9})["pause"]
        self.assertEqual((part["two_holders"], part["lost"]), (1, 1))

    def test_a_refused_write_is_no_update(self):
        workers = [worker("a", (0, 0, 5, None)), worker("b", (0, 2, 3, 1))]
        part = judge_locks({"workers": workers, "split": 9})["pause"]
        self.assertEqual((part["refused"], part["two_holders"], part["lost"]), (1, 1, 0))

    def test_a_stopped_holder_counts_once_however_many_follow(self):
        workers = [worker("a", (0, 0, 9, None)), worker("b", (0, 5, 6, 1), (6, 6, 7, 2))]
        part = judge_locks({"workers": workers, "split": 99})["pause"]
        self.assertEqual((part["two_holders"], part["lost"]), (1, 0))

    def test_a_hold_ends_with_its_work(self):
        first = {"name": "a", "events": [
            {"event": "ask", "at": 0}, {"event": "got", "at": 0}, {"event": "left", "at": 1},
            {"event": "done", "at": 3, "value": 1}]}
        part = judge_locks({"workers": [first, worker("b", (0, 2, 4, 2))], "split": 9})["pause"]
        self.assertEqual((part["done"], part["two_holders"]), (2, 0))

    def test_a_hold_belongs_to_the_part_of_its_grant(self):
        workers = [worker("a", (0, 0, 1, 1), (8, 20, 21, 2))]
        figures = judge_locks({"workers": workers, "split": 9})
        self.assertEqual((figures["pause"]["done"], figures["restart"]["done"]), (1, 1))
        self.assertEqual(figures["restart"]["longest_wait"], 12)


if __name__ == "__main__":
    unittest.main()
