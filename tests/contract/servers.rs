//! Servers that use a database's protocol, and are not that database.

use harness::{DIRECT, TestDatabase, TestDb, acquired, events, pool, proxy::Proxy};
use rowlock::{Error, LeaseLock, errors::Setup};
use sqlx::{Pool, pool::PoolOptions};
use tokio::sync::Mutex;

harness::tests!(
    postgres[DIRECT](an_untried_server_is_told_of),
    mysql_and_mariadb(tidb_is_refused),
    mysql_and_mariadb.alone(tidb_can_be_accepted)
);

/// A server cannot report another version for one session, so the proxy rewrites the query for
/// MySQL's version.
async fn at_tidb<DB: TestDatabase>(db: &TestDb<DB>) -> (Proxy, Pool<DB>) {
    let proxy = db.proxy().await;
    proxy.replace("VERSION()", "@v_banner");
    let options = PoolOptions::<DB>::new().after_connect(|conn, _| {
        Box::pin(async { DB::execute_on(conn, "SET @v_banner = '8.0.11-TiDB-v8.5.0'").await.map(drop) })
    });
    let pool = options.connect(&proxy.url).await.unwrap();
    (proxy, pool)
}

async fn tidb_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let (_proxy, pool) = at_tidb(&db).await;
    let told = |error: Error| {
        assert!(
            matches!(error, Error::Setup(Setup::Unsupported { .. })) && error.to_string().contains("TiDB"),
            "{error:?}"
        );
    };
    told(LeaseLock::new(pool.clone()).try_acquire("k").await.unwrap_err());
    db.execute("DROP TABLE t_resource_lock").await;
    told(rowlock::migrate(&pool).await.unwrap_err());
    let tables = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 't_resource_lock'";
    assert_eq!(db.number(tables).await, Some(0));
}

/// For the whole process, so that no other test may accept or refuse a server.
async fn tidb_can_be_accepted<DB: TestDatabase>(db: TestDb<DB>) {
    static ACCEPTING: Mutex<()> = Mutex::const_new(());
    let _accepting = ACCEPTING.lock().await;
    let (_proxy, pool) = at_tidb(&db).await;
    rowlock::admin::accept_any_server(true);
    let migrated = rowlock::migrate(&pool).await;
    let attempt = LeaseLock::new(pool.clone()).try_acquire("accepted").await;
    rowlock::admin::accept_any_server(false);
    migrated.unwrap();
    drop(acquired(attempt));
    let told = events::with("server=\"TiDB\"");
    assert!(told.iter().any(|event| event.contains("WARN")), "{told:?}");
    assert!(LeaseLock::new(pool).try_acquire("refused").await.is_err());
}

/// The warning is logged once for each lock's first check.
async fn an_untried_server_is_told_of<DB: TestDatabase>(db: TestDb<DB>) {
    let build = db.url.rsplit('_').next().unwrap().chars().take(32).collect::<String>();
    let version = format!("CockroachDB CCL v24.1.0 ({build})");
    db.execute("CREATE SCHEMA fake").await;
    db.execute(&format!("CREATE FUNCTION fake.version() RETURNS text LANGUAGE sql AS $$ SELECT '{version}' $$")).await;
    let mark = if db.url.contains('?') { '&' } else { '?' };
    let pool = pool::<DB>(&format!("{}{mark}options[search_path]=fake,pg_catalog,public", db.url), 4).await;
    rowlock::migrate(&pool).await.unwrap();
    for _ in 0..2 {
        let lock = LeaseLock::new(pool.clone());
        for key in ["a", "b"] {
            acquired(lock.clone().try_acquire(key).await).abandon().await.unwrap();
        }
    }
    let told = events::with(&build);
    assert_eq!(told.len(), 2, "{told:?}");
    for event in told {
        assert!(
            event.contains("WARN") && event.contains("server=\"CockroachDB\"") && event.contains("version="),
            "{event}"
        );
    }
}
