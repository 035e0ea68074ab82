// One instance of an application with graphile-worker. `prepare` makes its tables.
import { EventEmitter } from 'node:events'
import { appendFileSync, existsSync, readFileSync, writeFileSync } from 'node:fs'
import { makeWorkerUtils, run, runMigrations } from 'graphile-worker'
import pg from 'pg'

const connectionString = process.env.DATABASE_URL
const jobs = JSON.parse(process.env.CHAOS_JOBS)

if (process.argv[2] === 'prepare') {
  await runMigrations({ connectionString })
  process.exit(0)
}

const pool = new pg.Pool({ connectionString, max: 12 })
pool.on('error', (error) => console.error('pool', error.message))

async function work (name, slot) {
  const { rows } = await pool.query(
    'INSERT INTO chaos_run (job, slot, instance) VALUES ($1, $2, $3) RETURNING id',
    [name, slot, process.env.CHAOS_INSTANCE])
  await new Promise((resolve) => setTimeout(resolve, Number(process.env.CHAOS_WORK_MS)))
  await pool.query('UPDATE chaos_run SET ended_at = clock_timestamp() WHERE id = $1', [rows[0].id])
}

// The workers of this place's former process, which is dead, since this one was started.
const file = `${process.env.CHAOS_FOLDER}/workers-${process.env.CHAOS_PLACE}`
if (existsSync(file)) {
  const utils = await makeWorkerUtils({ connectionString })
  await utils.forceUnlockWorkers(readFileSync(file, 'utf8').trim().split('\n'))
  await utils.release()
}
writeFileSync(file, '')

const events = new EventEmitter()
events.on('worker:create', ({ worker }) => appendFileSync(file, worker.workerId + '\n'))

const runner = await run({
  connectionString,
  concurrency: 10,
  maxPoolSize: 20,
  pollInterval: 1000,
  events,
  crontab: jobs.map(({ name, every }) =>
    `${every === 60 ? '*' : `*/${every / 60}`} * * * * ${name} ?id=${name}&fill=1h`).join('\n'),
  taskList: Object.fromEntries(jobs.map(({ name }) =>
    [name, ({ _cron }) => work(name, _cron.ts)]))
})
await runner.promise
