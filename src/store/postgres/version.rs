//! Compare-and-set on PostgreSQL.

use sqlx::{PgConnection, Postgres, Row as _};

use crate::store::version::{
    Column, Holds, KeyValue, Seen, Value, VersionStore, Write, bind_key, exact, operations, whole,
};
use crate::{store::Reply, version::identifier::TableName};

/// A domain counts as its base type, through domains over domains. The scale of a numeric is in the
/// lowest eleven bits of its modifier, signed. Texts that differ may be equal in the column and not
/// in an index of another collation. An index does not cover the tables that inherit from its own.
const TABLE_COLUMNS: &str = "
WITH RECURSIVE made_of AS (
    SELECT a.attnum, a.atttypid AS type, a.atttypmod AS modifier FROM pg_attribute a
    WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT m.attnum, t.typbasetype, t.typtypmod FROM made_of m JOIN pg_type t ON t.oid = m.type WHERE t.typtype = 'd'
)
SELECT a.attname::text AS name, format_type(a.atttypid, a.atttypmod) AS type, format_type(m.type, NULL) AS base,
       CASE WHEN t.typname = 'numeric' AND m.modifier >= 4 THEN (((m.modifier - 4) & 2047) # 1024) - 1024 END AS scale,
       a.attgenerated <> '' OR a.attidentity = 'a' AS generated,
       EXISTS (SELECT FROM pg_rewrite w WHERE w.ev_class = a.attrelid AND w.ev_type = '2')
       OR EXISTS (SELECT FROM pg_trigger g
                  WHERE g.tgtype & 16 <> 0 AND g.tgenabled <> 'D' AND NOT g.tgisinternal
                    AND (g.tgrelid = a.attrelid OR g.tgrelid IN (SELECT relid FROM pg_partition_tree(a.attrelid)))) AS triggers,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
               AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum AND (i.indcollation[0] = a.attcollation OR NOT EXISTS (
                   SELECT FROM pg_collation o WHERE o.oid = a.attcollation AND NOT o.collisdeterministic)))
       AND NOT EXISTS (SELECT FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
                       WHERE h.inhparent = a.attrelid AND NOT c.relispartition) AS single
FROM pg_attribute a JOIN made_of m ON m.attnum = a.attnum JOIN pg_type t ON t.oid = m.type AND t.typtype <> 'd'
WHERE a.attrelid = to_regclass($1)";

impl VersionStore for Postgres {
    const QUOTE: char = '"';
    const EXACT_NAMES: bool = true;
    const HAS_NAN: bool = true;

    fn mark(index: usize) -> String {
        format!("${index}")
    }

    async fn table_columns(conn: &mut PgConnection, table: &TableName) -> Reply<Seen> {
        let rows = sqlx::query(TABLE_COLUMNS).bind(table.quoted(Self::QUOTE)).fetch_all(conn).await?;
        let mut seen = Seen::default();
        for row in rows {
            let base: String = row.try_get("base")?;
            let holds = match base.as_str() {
                "text" | "character varying" | "character" => Holds::Text,
                "smallint" | "integer" | "bigint" => Holds::Integer,
                "uuid" => Holds::Uuid,
                _ => Holds::Other,
            };
            seen.triggers = row.try_get("triggers")?;
            seen.columns.push(Column {
                name: row.try_get("name")?,
                generated: row.try_get("generated")?,
                text: (base == "numeric").then_some("{}::text"),
                column_type: row.try_get("type")?,
                holds,
                unique: row.try_get("single")?,
                scale: row.try_get("scale")?,
                read: if holds == Holds::Integer { "{}::bigint" } else { "{}" },
                // Compared as text, a padded column could not use its index.
                parameter: if base == "character" { "{}::bpchar" } else { "{}" },
            });
        }
        Ok(seen)
    }

    operations!(PgConnection);
}
