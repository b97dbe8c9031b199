//! How the clients of a Service use its endpoints: the values of a TrafficPolicy, or the proxy's
//! defaults. Pure: `discovery/policy.rs` makes these values.

use std::time::Duration;

use super::budget::BudgetSettings;
use super::outlier::{BreakerSettings, OutlierSettings};
use crate::upstream::connect::Limits;

/// How long a new endpoint gets a growing share of the requests: caches are empty, code is not
/// compiled yet.
const SLOW_START: Duration = Duration::from_secs(10);

/// How the clients of a Service use its endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendPolicy {
    /// The objects that it comes from, for logs. Empty: the proxy's defaults.
    pub name: String,
    /// Which endpoint gets a request.
    pub balancing: Balancing,
    /// The limits of each endpoint, for all workers of the proxy.
    pub limits: Limits,
    /// The time to connect, for all attempts of a request, or `None` for the proxy's default.
    pub connect_timeout: Option<Duration>,
    /// When an endpoint gets no requests for a while.
    pub outliers: OutlierSettings,
    /// When requests fail at once.
    pub breaker: Option<BreakerSettings>,
    /// How many requests are sent again, or `None` for the proxy's default of each worker.
    pub budget: Option<BudgetSettings>,
}

/// Which endpoint gets a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balancing {
    /// How endpoints are selected.
    pub algorithm: Algorithm,
    /// Endpoints in the zone of this proxy are preferred.
    pub prefer_zone: bool,
    /// How long the share of a new endpoint grows. 0: it has its share at once.
    pub slow_start: Duration,
}

impl Default for Balancing {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::default(),
            prefer_zone: false,
            slow_start: SLOW_START,
        }
    }
}

/// How endpoints are selected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// The better of two random endpoints, by latency and requests in flight.
    #[default]
    PeakEwma,
    /// The better of two random endpoints, by requests in flight.
    LeastRequest,
    /// One after the other.
    RoundRobin,
    /// By a hash of the request.
    ConsistentHash(HashKey),
}

/// The part of a request that is hashed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HashKey {
    /// The value of a header field with this name, without case.
    Header(String),
    /// The value of a cookie with this name.
    Cookie(String),
    /// The address of the client.
    Source,
}
