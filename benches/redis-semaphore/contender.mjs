// The permits of redis-semaphore, a client of Redis for Node. Arguments: the URL, the key and the
// number of permits. Each line of the input is a round: how many tasks, and for how many
// milliseconds. Its answer is one line: `round`, the nanoseconds that the round took, and those
// of each cycle.

import { createInterface } from "node:readline";
import Redis from "ioredis";
import { Semaphore } from "redis-semaphore";

const [url, key, permits] = process.argv.slice(2);
const client = new Redis(url);
const options = { lockTimeout: 30_000, acquireTimeout: 60_000 };

async function task(until) {
  const semaphore = new Semaphore(client, key, Number(permits), options);
  const cycles = [];
  do {
    const from = process.hrtime.bigint();
    await semaphore.acquire();
    await semaphore.release();
    cycles.push(process.hrtime.bigint() - from);
  } while (process.hrtime.bigint() < until);
  return cycles;
}

for await (const line of createInterface({ input: process.stdin })) {
  const [tasks, millis] = line.split(" ").map(Number);
  const from = process.hrtime.bigint();
  const until = from + BigInt(millis) * 1_000_000n;
  const cycles = await Promise.all(Array.from({ length: tasks }, () => task(until)));
  console.log(["round", process.hrtime.bigint() - from, ...cycles.flat()].join(" "));
}
client.disconnect();
