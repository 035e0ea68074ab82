// One instance of an application with pg-boss. `prepare` makes its tables, queues and schedules.
import { PgBoss } from 'pg-boss'
import pg from 'pg'

const jobs = JSON.parse(process.env.CHAOS_JOBS)
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 25 })
pool.on('error', (error) => console.error('pool', error.message))

const boss = new PgBoss({
  connectionString: process.env.DATABASE_URL,
  useListenNotify: true,
  superviseIntervalSeconds: 10,
  monitorIntervalSeconds: 10,
  cronMonitorIntervalSeconds: 10,
  cronWorkerIntervalSeconds: 1
})
boss.on('error', (error) => console.error('pg-boss', error.message))
await boss.start()

async function work (name, createdOn) {
  // It tells no tick. That of a job is the minute in which it was made.
  const every = jobs.find((job) => job.name === name).every * 1000
  const slot = new Date(Math.floor(createdOn.getTime() / every) * every)
  const { rows } = await pool.query(
    'INSERT INTO chaos_run (job, slot, instance) VALUES ($1, $2, $3) RETURNING id',
    [name, slot, process.env.CHAOS_INSTANCE])
  await new Promise((resolve) => setTimeout(resolve, Number(process.env.CHAOS_WORK_MS)))
  await pool.query('UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = $1', [rows[0].id])
}

if (process.argv[2] === 'prepare') {
  for (const { name, every } of jobs) {
    await boss.createQueue(name, {
      policy: 'singleton', heartbeatSeconds: 10, retryLimit: 10, retryDelay: 1, notify: true
    })
    await boss.schedule(name, every === 60 ? '* * * * *' : `*/${every / 60} * * * *`)
  }
  await boss.stop()
  await pool.end()
} else {
  for (const { name } of jobs) {
    await boss.work(name, { includeMetadata: true }, ([job]) => work(name, job.createdOn))
  }
  process.on('SIGTERM', async () => {
    await boss.stop({ timeout: 5000 })
    process.exit(0)
  })
}
