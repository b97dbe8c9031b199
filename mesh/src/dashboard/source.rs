//! The data that the dashboard shows: the traffic of the mesh, and the records and states of
//! proxies. Changes nothing.

use diy_mesh_model::exchange::{Direction, Exchange, ExchangeId};
use diy_mesh_model::state::State;
use serde::Serialize;

use crate::traffic::Sample;
use crate::why::{Story, peer};

/// The latest failures of a workload that are shown, and as many others.
const MAX_EXCHANGES: usize = 50;

/// Where the data comes from. An error is a text for people.
pub trait Source {
    /// The traffic that proxies saw lately.
    fn sample(&self) -> impl Future<Output = Result<Sample, String>>;
    /// The records and states of the proxies of a workload, `NAMESPACE/NAME`.
    fn workload(&self, name: &str) -> impl Future<Output = Result<Workload, String>>;
    /// Why an exchange did what it did.
    fn story(&self, id: ExchangeId) -> impl Future<Output = Result<Story, String>>;
    /// The latest failure of a workload's calls to a Service, both `NAMESPACE/NAME`.
    fn latest(&self, from: &str, to: &str) -> impl Future<Output = Result<Story, String>>;
}

/// The records and states of the proxies of a workload.
#[derive(Debug, Default, Serialize)]
pub struct Workload {
    /// The latest first.
    pub exchanges: Vec<Line>,
    /// The pods that were asked.
    pub pods: Vec<PodState>,
    /// The number of further pods.
    pub omitted: usize,
}

/// A pod with a proxy.
#[derive(Debug, Serialize)]
pub struct PodState {
    /// Namespace and name.
    pub pod: String,
    /// The state in force.
    pub state: Option<State>,
    /// The reason why data is missing.
    pub error: Option<String>,
}

/// An exchange, without its header fields.
#[derive(Debug, Serialize)]
pub struct Line {
    id: Option<ExchangeId>,
    time: String,
    direction: Direction,
    /// The other end.
    with: String,
    subject: String,
    status: Option<String>,
    duration_ms: f64,
    is_failure: bool,
    /// The code of the error of a proxy.
    failure: Option<String>,
}

impl From<&Exchange> for Line {
    fn from(exchange: &Exchange) -> Self {
        Self {
            id: exchange.id,
            time: exchange.time.clone(),
            direction: exchange.direction,
            with: peer(exchange),
            subject: exchange.subject(),
            status: exchange.status(),
            duration_ms: exchange.duration_ms,
            is_failure: exchange.is_failure(),
            failure: exchange.code().map(str::to_owned),
        }
    }
}

impl Workload {
    /// From the answers of its proxies.
    pub fn new(pods: Vec<PodState>, exchanges: &[Exchange], omitted: usize) -> Self {
        let mut exchanges: Vec<Line> = exchanges.iter().map(Line::from).collect();
        exchanges.sort_by(|one, other| other.time.cmp(&one.time));
        let mut shown = [0; 2];
        exchanges.retain(|line| {
            let shown = &mut shown[usize::from(line.is_failure)];
            *shown += 1;
            *shown <= MAX_EXCHANGES
        });
        Self {
            exchanges,
            pods,
            omitted,
        }
    }
}
