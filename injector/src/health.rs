//! Whether this injector can be relied on, told to probes and people. Serves /live, /ready and /metrics, in the clear.
//!
//! It never changes anything: whoever keeps the certificates reports here.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use tokio::sync::watch;

use crate::metrics::Metrics;

/// What stands in the way of being ready; none when nothing does.
#[derive(Debug)]
pub struct Health {
    state: watch::Sender<State>,
    metrics: Arc<Metrics>,
}

#[derive(Clone, Debug)]
enum State {
    NotReady(String),
    ReadyUntil(SystemTime),
    Stopping,
}

impl Health {
    /// Not ready yet.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            state: watch::Sender::new(State::NotReady("there is no certificate yet".into())),
            metrics,
        }
    }

    /// All is well for as long as the serving certificate lives.
    pub fn ready_until(&self, end: SystemTime) {
        self.change(State::ReadyUntil(end));
    }

    /// Something stands in the way.
    pub fn not_ready(&self, reason: impl Into<String>) {
        self.change(State::NotReady(reason.into()));
    }

    /// Something stands in the way of what has not been well so far; what has been stays.
    pub fn not_ready_yet(&self, reason: impl Into<String>) {
        if !matches!(&*self.state.borrow(), State::ReadyUntil(_)) {
            self.not_ready(reason);
        }
    }

    /// No more new connections, please. Nothing takes it back.
    pub fn stopping(&self) {
        self.change(State::Stopping);
    }

    fn change(&self, new: State) {
        self.state.send_if_modified(|state| {
            let open = !matches!(state, State::Stopping);
            if open {
                *state = new;
            }
            open
        });
    }

    /// Why it is not ready at this time, if it is not.
    pub fn obstacle(&self, now: SystemTime) -> Option<String> {
        match &*self.state.borrow() {
            State::NotReady(reason) => Some(reason.clone()),
            State::ReadyUntil(end) if now >= *end => {
                Some("the serving certificate has expired".into())
            }
            State::ReadyUntil(_) => None,
            State::Stopping => Some("stopping".into()),
        }
    }

    /// Returns once it is ready.
    pub async fn wait(&self) {
        let ready = |state: &State| matches!(state, State::ReadyUntil(_));
        self.state
            .subscribe()
            .wait_for(ready)
            .await
            .expect("this holds the sender");
    }

    /// Answers a request to the admin server.
    pub fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        let (status, text) = match request.uri().path() {
            "/live" => (StatusCode::OK, "live\n".into()),
            "/ready" => match self.obstacle(SystemTime::now()) {
                None => (StatusCode::OK, "ready\n".into()),
                Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
            },
            "/metrics" => (StatusCode::OK, self.metrics.text()),
            _ => (
                StatusCode::NOT_FOUND,
                "nothing here: try /live, /ready or /metrics\n".into(),
            ),
        };
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        response.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"),
        );
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn ready_ends_with_the_certificate_and_with_the_signal_to_stop() {
        let health = Health::new(Arc::default());
        let now = SystemTime::now();
        assert_eq!(
            health.obstacle(now).as_deref(),
            Some("there is no certificate yet")
        );
        health.ready_until(now + Duration::from_secs(60));
        assert_eq!(health.obstacle(now), None);
        assert_eq!(
            health.obstacle(now + Duration::from_secs(60)).as_deref(),
            Some("the serving certificate has expired")
        );
        health.stopping();
        health.ready_until(now + Duration::from_secs(60));
        assert_eq!(health.obstacle(now).as_deref(), Some("stopping"));
    }
}
