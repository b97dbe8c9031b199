//! The readiness of the injector: a serving certificate that has not expired, and a webhook
//! configuration with its CA.

use tokio::sync::watch;
use tokio::time::Instant;

/// The state of the certificates. Updated by their publisher.
#[derive(Debug)]
pub struct Health {
    state: watch::Sender<State>,
}

#[derive(Clone, Debug)]
enum State {
    NotReady(String),
    ReadyUntil(Instant),
}

impl Default for Health {
    fn default() -> Self {
        let reason = "no certificate yet".into();
        Self {
            state: watch::Sender::new(State::NotReady(reason)),
        }
    }
}

impl Health {
    /// Marks the injector as ready until the serving certificate expires.
    pub fn ready_until(&self, not_after: Instant) {
        self.state.send_replace(State::ReadyUntil(not_after));
    }

    /// Marks the injector as not ready.
    pub fn not_ready(&self, reason: impl Into<String>) {
        self.state.send_replace(State::NotReady(reason.into()));
    }

    /// Marks the injector as not ready, unless it has been ready before.
    pub fn not_ready_yet(&self, reason: impl Into<String>) {
        if !matches!(&*self.state.borrow(), State::ReadyUntil(_)) {
            self.not_ready(reason);
        }
    }

    /// The reason why the injector is not ready.
    pub fn unmet(&self) -> Option<String> {
        match &*self.state.borrow() {
            State::NotReady(reason) => Some(reason.clone()),
            State::ReadyUntil(not_after) => {
                (Instant::now() >= *not_after).then(|| "the serving certificate has expired".into())
            }
        }
    }

    /// Waits until the injector is ready.
    pub async fn wait(&self) {
        self.state
            .subscribe()
            .wait_for(|state| matches!(state, State::ReadyUntil(_)))
            .await
            .expect("self holds the sender");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn is_ready_from_the_first_certificate_until_the_last_expires() {
        let health = Health::default();
        assert_eq!(health.unmet().as_deref(), Some("no certificate yet"));
        health.not_ready_yet("the API does not respond");
        assert_eq!(health.unmet().as_deref(), Some("the API does not respond"));
        let life = Duration::from_secs(60);
        health.ready_until(Instant::now() + life);
        health.not_ready_yet("the API does not respond");
        assert_eq!(health.unmet(), None);
        tokio::time::advance(life).await;
        assert_eq!(
            health.unmet().as_deref(),
            Some("the serving certificate has expired")
        );
    }
}
