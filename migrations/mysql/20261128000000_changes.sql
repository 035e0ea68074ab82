-- rowlock: what operators have changed, on MySQL and MariaDB. Every statement here may run again on a database that has it already. Times are UTC.
CREATE TABLE IF NOT EXISTS t_resource_change (
    id     BIGINT         NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at     DATETIME(6)    NOT NULL,
    who    VARCHAR(255) CHARACTER SET utf8mb4 NOT NULL,                           -- the label of the operator
    what   VARCHAR(32) CHARACTER SET ascii NOT NULL,                              -- 'released', 'paused', 'stopped' and so on
    name   VARBINARY(255) NOT NULL,                                               -- of the key, the schedule or the instance
    detail TEXT CHARACTER SET utf8mb4 NOT NULL,                                   -- such as the holder from whom a key was taken
    KEY (name, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARSET = utf8mb4;
