//! Batched releases, each of one lease or of a set.

use std::sync::Arc;

use tokio::{sync::OnceCell, time::Instant};

use crate::{
    batch::op::BatchOp,
    key::{Claim, Key},
    schema::Table,
    store::{Change, Database, Outcome, Reply},
};

pub(crate) struct Releases {
    pub table: Arc<OnceCell<Table>>,
}

pub(crate) struct Release {
    pub claims: Vec<Claim>,
    pub change: Change,
    /// It was sent before and not settled, so it is sent alone.
    pub alone: bool,
}

impl<DB: Database> BatchOp<DB> for Releases {
    type Request = Release;
    type Output = Vec<Outcome>;

    fn key(release: &Release) -> Option<&Key> {
        if let ([claim], false) = (&release.claims[..], release.alone) { Some(&claim.key) } else { None }
    }

    fn can_share_statement(release: &Release, other: &Release) -> bool {
        release.change == other.change
    }

    fn share(_: &Vec<Outcome>) -> Option<Vec<Outcome>> {
        None
    }

    async fn run(&self, conn: &mut DB::Connection, requests: &[Release], _: Instant) -> Reply<Vec<Vec<Outcome>>> {
        let Some(Release { change, .. }) = requests.first() else { return Ok(Vec::new()) };
        let claims: Vec<Claim> = requests.iter().flat_map(|release| release.claims.clone()).collect();
        let form = self.table.get().map(|table| table.form).unwrap_or_default();
        let mut outcomes = DB::change(conn, &claims, *change, None, form).await?.into_iter();
        Ok(requests.iter().map(|release| outcomes.by_ref().take(release.claims.len()).collect()).collect())
    }
}
