//! The Lease that elects one replica to write the status of routes. It is never on the path of
//! discovery: every replica serves proxies, with the Lease or without it.
//!
//! Clocks are not compared. A Lease expires when an observer has seen no change of it for its
//! duration. Its resource version prevents that two replicas take it over.

use std::time::Duration;

use diy_mesh_runtime::Backoff;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::time::{Instant, sleep, timeout_at};

use crate::api::request;

/// The name of the Lease, in the namespace of the mesh.
pub const LEASE: &str = "diy-service-mesh-status";

const MIN_RETRY_INTERVAL: Duration = Duration::from_millis(250);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The times of an election, which tests shorten.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Time without a change until another replica takes over.
    pub lease_duration: Duration,
    /// Interval of renewals, and of attempts to acquire the Lease.
    pub renew_interval: Duration,
    /// Time since the last renewal until the holder stops. Shorter than the duration.
    pub renew_timeout: Duration,
    /// Time for a request to the API.
    pub api_timeout: Duration,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            lease_duration: Duration::from_secs(30),
            renew_interval: Duration::from_secs(10),
            renew_timeout: Duration::from_secs(20),
            api_timeout: Duration::from_secs(5),
        }
    }
}

/// The part of one replica in the election.
pub struct Election {
    leases: Api<Lease>,
    /// The name of this replica.
    replica: String,
    timing: Timing,
    /// The resource version of the Lease, and the time since which it is known.
    observed: Option<(String, Instant)>,
}

impl Election {
    /// An election in the namespace of the mesh.
    pub fn new(client: Client, namespace: &str, replica: String, timing: Timing) -> Election {
        Election {
            leases: Api::namespaced(client, namespace),
            replica,
            timing,
            observed: None,
        }
    }

    /// Waits until this replica holds the Lease.
    pub async fn acquire(&mut self) {
        while !self.hold().await {
            // Jitter spreads the requests of replicas that have started together.
            let jitter = 1.0 + fastrand::f64() / 5.0;
            sleep(self.timing.renew_interval.mul_f64(jitter)).await;
        }
    }

    /// Renews the Lease. Returns when this replica has lost it, or cannot renew it in time.
    pub async fn keep(&mut self) {
        let mut renewed = Instant::now();
        loop {
            sleep(self.timing.renew_interval).await;
            let (started, deadline) = (Instant::now(), renewed + self.timing.renew_timeout);
            match timeout_at(deadline, self.hold()).await {
                Ok(true) => renewed = started,
                Ok(false) | Err(_) => return,
            }
        }
    }

    /// Gives the Lease up, so that another replica does not wait for its end. Best effort.
    pub async fn release(self) {
        let release = async {
            let mut lease = self.leases.get(LEASE).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_ref() == Some(&self.replica) {
                spec.holder_identity = Some(String::new());
                spec.renew_time = Some(MicroTime(Timestamp::now()));
                let params = PostParams::default();
                self.leases.replace(LEASE, &params, &lease).await?;
            }
            Ok::<_, kube::Error>(())
        };
        if let Err(error) = request(self.timing.api_timeout, release).await {
            tracing::debug!("cannot release Lease {LEASE}: {error}");
        }
    }

    /// Acquires or renews the Lease. Returns whether this replica holds it. Retries after errors.
    async fn hold(&mut self) -> bool {
        let mut backoff = Backoff::new(MIN_RETRY_INTERVAL, MAX_RETRY_INTERVAL);
        loop {
            let api_timeout = self.timing.api_timeout;
            let error = match request(api_timeout, self.try_hold()).await {
                Ok(holds) => return holds,
                Err(error) if error.is(409) => {
                    tracing::debug!("Lease {LEASE} has changed, retrying");
                    sleep(MIN_RETRY_INTERVAL).await;
                    continue;
                }
                Err(error) => error,
            };
            let delay = backoff.next_delay();
            tracing::warn!("cannot hold Lease {LEASE}, retrying in {delay:?}: {error}");
            sleep(delay).await;
        }
    }

    async fn try_hold(&mut self) -> kube::Result<bool> {
        let params = PostParams::default();
        let Some(mut lease) = self.leases.get_opt(LEASE).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(LEASE.into()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.held(LeaseSpec::default())),
            };
            self.leases.create(&params, &lease).await?;
            return Ok(true);
        };
        let spec = lease.spec.take().unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let version = lease.metadata.resource_version.clone();
        let unchanged = self.observe(version.unwrap_or_default());
        let seconds = spec.lease_duration_seconds.and_then(|s| s.try_into().ok());
        let duration = seconds.map_or(self.timing.lease_duration, Duration::from_secs);
        if !holder.is_empty() && holder != self.replica && unchanged < duration {
            return Ok(false);
        }
        lease.spec = Some(self.held(spec));
        self.leases.replace(LEASE, &params, &lease).await?;
        Ok(true)
    }

    /// The time since which the Lease is known to have this version.
    fn observe(&mut self, version: String) -> Duration {
        match &self.observed {
            Some((observed, since)) if *observed == version => since.elapsed(),
            _ => {
                self.observed = Some((version, Instant::now()));
                Duration::ZERO
            }
        }
    }

    /// A Lease that this replica renews, or takes over from another holder.
    fn held(&self, before: LeaseSpec) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let renewal = before.holder_identity.as_ref() == Some(&self.replica);
        let transitions = before.lease_transitions.unwrap_or(0);
        let seconds = self.timing.lease_duration.as_secs().max(1);
        LeaseSpec {
            holder_identity: Some(self.replica.clone()),
            lease_duration_seconds: Some(i32::try_from(seconds).unwrap_or(i32::MAX)),
            acquire_time: before
                .acquire_time
                .filter(|_| renewal)
                .or(Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions.saturating_add(i32::from(!renewal))),
            ..before
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::ResourceExt;
    use serde_json::json;

    use super::*;
    use crate::status::testing::ApiServer;

    const PATH: &str =
        "/apis/coordination.k8s.io/v1/namespaces/mesh/leases/diy-service-mesh-status";

    fn election(server: &ApiServer, replica: &str) -> Election {
        Election::new(server.client(), "mesh", replica.into(), Timing::default())
    }

    fn holder(server: &ApiServer) -> String {
        let lease = server.get(PATH).expect("the Lease exists");
        lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn one_replica_holds_the_lease_until_it_releases_it() {
        let server = ApiServer::default();
        let (mut one, mut other) = (election(&server, "one"), election(&server, "other"));
        one.acquire().await;
        assert!(!other.try_hold().await.unwrap());
        // The holder renews for longer than the duration.
        tokio::select! {
            () = one.keep() => panic!("the holder keeps the Lease"),
            () = other.acquire() => panic!("the Lease does not expire"),
            () = sleep(Duration::from_secs(300)) => {}
        }
        assert_eq!(holder(&server), "one");
        one.release().await;
        assert_eq!(holder(&server), "");
        other.acquire().await;
        assert_eq!(holder(&server), "other");
        let lease: Lease = serde_json::from_value(server.get(PATH).unwrap()).unwrap();
        assert_eq!(lease.name_any(), LEASE);
        assert_eq!(lease.spec.unwrap().lease_transitions, Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn lease_without_changes_expires_whatever_its_clock() {
        for renewed in ["1970-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"] {
            let server = ApiServer::default();
            let spec =
                json!({"holderIdentity": "gone", "leaseDurationSeconds": 30, "renewTime": renewed});
            server.put(PATH, json!({"metadata": {"name": LEASE}, "spec": spec}));
            let mut election = election(&server, "one");
            assert!(!election.try_hold().await.unwrap(), "{renewed}");
            let started = Instant::now();
            election.acquire().await;
            assert!(started.elapsed() >= Duration::from_secs(30), "{renewed}");
            assert_eq!(holder(&server), "one");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn holder_stops_before_others_take_over_if_it_cannot_renew() {
        let server = ApiServer::default();
        let mut one = election(&server, "one");
        one.acquire().await;
        server.fail_all(Some(500));
        let started = Instant::now();
        one.keep().await;
        let timing = Timing::default();
        assert!(started.elapsed() <= timing.renew_timeout);
        assert!(timing.renew_timeout < timing.lease_duration);
    }

    #[tokio::test(start_paused = true)]
    async fn replica_that_was_replaced_stops() {
        let server = ApiServer::default();
        let mut one = election(&server, "one");
        one.acquire().await;
        let mut lease = server.get(PATH).unwrap();
        lease["spec"]["holderIdentity"] = json!("other");
        server.put(PATH, lease);
        one.keep().await;
        assert_eq!(holder(&server), "other");
        one.release().await;
        assert_eq!(holder(&server), "other");
    }

    #[tokio::test(start_paused = true)]
    async fn conflicting_takeovers_have_one_winner() {
        let server = ApiServer::default();
        server.put(PATH, json!({"metadata": {"name": LEASE}, "spec": {}}));
        // Another replica writes between the read and the write.
        server.conflict_once(PATH, |lease| {
            lease["spec"] = json!({"holderIdentity": "other", "leaseDurationSeconds": 30});
        });
        let mut one = election(&server, "one");
        assert!(!one.hold().await);
        assert_eq!(holder(&server), "other");
    }
}
