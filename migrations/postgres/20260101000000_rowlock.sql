-- rowlock: the table of its locks. Every statement here may run again on a database that has it already.
CREATE TABLE IF NOT EXISTS t_resource_lock (
    key_resource varchar(255) COLLATE "C" PRIMARY KEY, -- compared byte by byte
    status       char(1)     NOT NULL DEFAULT 'S',     -- 'S' success, 'F' failure, 'P' in progress
    lock_flag    smallint    NOT NULL DEFAULT 0,       -- 1 locked, 0 free
    begin_time   timestamptz DEFAULT 'epoch',
    end_time     timestamptz,
    client_ip    varchar(45) NOT NULL DEFAULT '',      -- who took it
    time         int         NOT NULL DEFAULT 60       -- minutes within which only one node may take it
);

DO $$
DECLARE
    begin_type text := (SELECT format_type(atttypid, atttypmod) FROM pg_attribute
                        WHERE attrelid = 't_resource_lock'::regclass AND attname = 'begin_time');
BEGIN
    -- claimed_at repeats begin_time, so it has its type: both then round alike.
    EXECUTE format('ALTER TABLE t_resource_lock ADD COLUMN IF NOT EXISTS holder uuid,
        ADD COLUMN IF NOT EXISTS token bigint NOT NULL DEFAULT 0,
        ADD COLUMN IF NOT EXISTS expires_at timestamptz,
        ADD COLUMN IF NOT EXISTS claimed_at %s,
        ADD COLUMN IF NOT EXISTS confirms bigint NOT NULL DEFAULT 0,
        ADD COLUMN IF NOT EXISTS prior_token bigint,
        ADD COLUMN IF NOT EXISTS prior_client_ip varchar(45)', begin_type);
END $$;
