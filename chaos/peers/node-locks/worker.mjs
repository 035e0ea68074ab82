// A worker that adds to a counter under a lock in Redis.
import { writeSync } from 'node:fs'
import Redis from 'ioredis'
import { Mutex } from 'redis-semaphore'
import Redlock from 'redlock'

const lease = Number(process.env.CHAOS_LEASE) * 1000
const client = new Redis(process.env.REDIS_URL)
client.on('error', (error) => console.error(error.message))

const tell = (event, more) =>
  writeSync(1, JSON.stringify({ event, at: Date.now() / 1000, ...more }) + '\n')
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms))

async function hold (stands) {
  let sent = false
  try {
    const value = Number(await client.get('counter')) + 1
    await sleep(50)
    if (!stands()) return tell('refused')
    tell('checked')
    await sleep(50)
    sent = true
    await client.set('counter', value)
    tell('done', { value })
  } catch (error) {
    console.error(error.message)
    tell(sent ? 'unknown' : 'refused')
  }
}

const redlock = new Redlock([client], { retryCount: -1 })
redlock.on('error', () => {})

const ways = {
  redlock: (work) =>
    redlock.using(['counter-lock'], lease, (signal) => work(() => !signal.aborted)),
  'redis-semaphore': async (work) => {
    const mutex = new Mutex(client, 'counter-lock', {
      lockTimeout: lease,
      acquireTimeout: Infinity,
      onLockLost: (error) => console.error(error.message)
    })
    await mutex.acquire()
    try {
      await work(() => mutex.isAcquired)
    } finally {
      await mutex.release()
    }
  }
}

let asked = false
for (;;) {
  if (!asked) {
    tell('ask')
    asked = true
  }
  try {
    await ways[process.argv[2]](async (stands) => {
      tell('got')
      asked = false
      await hold(stands)
    })
  } catch (error) {
    console.error(error.message)
    await sleep(100)
  }
}
