//! etcd's lock, over gRPC. The messages are declared here: etcd-client has the same ones, but needs
//! the protobuf compiler to be installed.

use std::time::Duration;

use tonic::{
    Request,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{Ask, Lock};
use crate::error::Error;

/// Longer than any measurement. The server removes the leases after that.
const TTL_SECONDS: i64 = 1800;

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    id: i64,
    #[prost(string, tag = "4")]
    error: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LockRequest {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LockResponse {
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct UnlockRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct UnlockResponse {}

/// One connection for all tasks, and a lease for each of them.
pub struct Etcd {
    channel: Channel,
    leases: Vec<i64>,
    prefix: String,
}

impl Etcd {
    pub async fn new(url: &str, prefix: &str, tasks: usize) -> Result<Self, Error> {
        let channel = Endpoint::from_shared(url.to_owned())?.connect_timeout(Duration::from_secs(10)).connect().await?;
        let mut leases = Vec::with_capacity(tasks);
        for _ in 0..tasks {
            let asked = LeaseGrantRequest { ttl: TTL_SECONDS };
            let lease: LeaseGrantResponse = call(&channel, "/etcdserverpb.Lease/LeaseGrant", asked).await?;
            if !lease.error.is_empty() {
                return Err(lease.error.into());
            }
            leases.push(lease.id);
        }
        Ok(Self { channel, leases, prefix: prefix.to_owned() })
    }
}

impl Lock for Etcd {
    type Held = Vec<u8>;

    /// `Lock` waits for a key that is held. Here each task has its own.
    async fn acquire(&self, ask: &Ask<'_>) -> Result<Option<Vec<u8>>, Error> {
        let name = format!("{}/{}", self.prefix, ask.key).into_bytes();
        let lease = *self.leases.get(ask.task).ok_or("a task without a lease")?;
        let held: LockResponse = call(&self.channel, "/v3lockpb.Lock/Lock", LockRequest { name, lease }).await?;
        Ok(Some(held.key))
    }

    async fn release(&self, _: &Ask<'_>, key: Vec<u8>) -> Result<(), Error> {
        let UnlockResponse {} = call(&self.channel, "/v3lockpb.Lock/Unlock", UnlockRequest { key }).await?;
        Ok(())
    }
}

async fn call<A, R>(channel: &Channel, path: &'static str, asked: A) -> Result<R, Error>
where
    A: prost::Message + Default + 'static,
    R: prost::Message + Default + 'static,
{
    let mut grpc = Grpc::new(channel.clone());
    grpc.ready().await?;
    let path = PathAndQuery::from_static(path);
    Ok(grpc.unary(Request::new(asked), path, ProstCodec::<A, R>::default()).await?.into_inner())
}
