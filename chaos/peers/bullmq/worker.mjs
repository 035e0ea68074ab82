// One instance of an application with BullMQ. `prepare` makes the schedulers.
import { Queue, Worker } from 'bullmq'
import pg from 'pg'

const connection = { url: process.env.REDIS_URL }
const lease = Number(process.env.CHAOS_LEASE) * 1000
const jobs = JSON.parse(process.env.CHAOS_JOBS)
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 12 })
pool.on('error', (error) => console.error('pool', error.message))

async function work (name, slot) {
  const { rows } = await pool.query(
    'INSERT INTO chaos_run (job, slot, instance) VALUES ($1, $2, $3) RETURNING id',
    [name, slot, process.env.CHAOS_INSTANCE])
  await new Promise((resolve) => setTimeout(resolve, Number(process.env.CHAOS_WORK_MS)))
  await pool.query('UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = $1', [rows[0].id])
}

const queues = []
for (const { name, every } of jobs) {
  const queue = new Queue(name, { connection })
  queue.on('error', (error) => console.error('queue', error.message))
  await queue.upsertJobScheduler(name, { pattern: `*/${every} * * * * *`, tz: 'UTC' }, {
    name, opts: { attempts: 10, backoff: { type: 'fixed', delay: 1000 }, removeOnComplete: 1000 }
  })
  queues.push(queue)
}

if (process.argv[2] === 'prepare') {
  for (const queue of queues) await queue.close()
  await pool.end()
} else {
  // The time of a job that a scheduler has made is the end of its ID.
  const workers = jobs.map(({ name }) => new Worker(name,
    (job) => work(name, new Date(Number(job.id.split(':').pop()))),
    {
      connection,
      concurrency: 10,
      lockDuration: lease,
      stalledInterval: lease,
      maxStalledCount: 10
    }))
  for (const worker of workers) {
    worker.on('error', (error) => console.error('worker', error.message))
  }
  process.on('SIGTERM', async () => {
    for (const worker of workers) await worker.close()
    process.exit(0)
  })
}
