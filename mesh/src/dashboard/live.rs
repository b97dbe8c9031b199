//! The data of the dashboard from a cluster: its controller and its proxies. Changes nothing.

use diy_mesh_model::exchange::ExchangeId;
use futures::future::join_all;
use tokio::sync::Mutex;

use super::source::{PodState, Source, Workload};
use crate::{proxies::Proxies, sample::Sampler, traffic::Sample, why::Story};

/// The pods of a workload that are asked.
const MAX_PODS: usize = 4;

/// A cluster.
pub struct Live {
    /// The traffic that its proxies saw.
    pub sampler: Mutex<Sampler>,
    /// Its proxies.
    pub proxies: Proxies,
}

impl Source for Live {
    async fn sample(&self) -> Result<Sample, String> {
        let sample = self.sampler.lock().await.sample().await;
        sample.map_err(|error| error.to_string())
    }

    async fn workload(&self, name: &str) -> Result<Workload, String> {
        let pods = self.proxies.named(name).await;
        let mut pods = pods.map_err(|error| error.to_string())?;
        let omitted = pods.len().saturating_sub(MAX_PODS);
        pods.truncate(MAX_PODS);
        let asked = pods.iter().map(async |pod| {
            let (state, recent) = (self.proxies.state(pod, ""), self.proxies.recent(pod, ""));
            let (state, recent) = tokio::join!(state, recent);
            let error = state.as_ref().err().or(recent.as_ref().err());
            let state = PodState {
                pod: pod.full_name(),
                error: error.map(ToString::to_string),
                state: state.ok(),
            };
            (state, recent.unwrap_or_default().exchanges)
        });
        let (pods, exchanges): (Vec<_>, Vec<_>) = join_all(asked).await.into_iter().unzip();
        Ok(Workload::new(pods, &exchanges.concat(), omitted))
    }

    async fn story(&self, id: ExchangeId) -> Result<Story, String> {
        let story = self.proxies.story(id).await;
        story.map_err(|error| error.to_string())
    }

    async fn latest(&self, from: &str, to: &str) -> Result<Story, String> {
        let story = self.proxies.latest_between(from, to).await;
        let missing = || format!("no proxy knows a recent exchange from {from} to {to}");
        story
            .map_err(|error| error.to_string())?
            .ok_or_else(missing)
    }
}
