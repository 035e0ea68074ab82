"""Tests of the plan of faults."""

import unittest

import plan


class Plan(unittest.TestCase):
    def test_a_seed_decides_every_fault(self):
        self.assertEqual(plan.faults(7, 600), plan.faults(7, 600))
        self.assertNotEqual(plan.faults(7, 600), plan.faults(8, 600))

    def test_all_faults_are_there_and_in_order(self):
        faults = plan.faults(1, 600)
        kinds = [kind for _, kind, _ in faults]
        self.assertEqual(kinds.count("kill"), 299)
        self.assertEqual((kinds.count("pause"), kinds.count("restart"), kinds.count("deploy")),
                         (1, 2, 1))
        self.assertEqual([at for at, _, _ in faults], sorted(at for at, _, _ in faults))

    def test_kills_come_at_any_part_of_a_second(self):
        parts = {int(at * 10) % 10 for at, kind, _ in plan.faults(1, 600) if kind == "kill"}
        self.assertEqual(parts, set(range(10)))

    def test_a_pause_is_longer_than_the_lease(self):
        self.assertTrue(all(plan.pause_of(seconds) > plan.LEASE for seconds in (1, 60, 600)))

    def test_both_grains_have_as_many_ticks(self):
        ticks = [sum(seconds // job["every"] for job in plan.jobs(grain))
                 for grain, seconds in (("second", 600), ("minute", 1800))]
        self.assertEqual(ticks[0], ticks[1])


if __name__ == "__main__":
    unittest.main()
