//! Discovery without a controller, for tests that answer themselves.

use super::*;

/// The main thread's end of the queue, for tests that respond themselves.
pub(crate) struct Questions(mpsc::Receiver<Request>);

impl Questions {
    /// The resource of the next request, and a function that responds to it and returns the
    /// sender of updates.
    pub(crate) async fn next(
        &mut self,
    ) -> (
        Resource,
        impl FnOnce(Arc<Target>) -> watch::Sender<Arc<Target>> + use<>,
    ) {
        let (resource, response) = loop {
            match self.0.recv().await.expect("a handle exists") {
                Request::Watch(resource, response) => break (resource, response),
                // There is no state without a driver.
                Request::State(_) => {}
            }
        };
        (resource, move |target| {
            let (sender, receiver) = watch::channel(target);
            // The worker may have dropped the request.
            let _ = response.send(Watched {
                receiver,
                settled: true,
            });
            sender
        })
    }
}

impl Discovery {
    /// Discovery that receives nothing but the policy of this pod.
    pub(crate) fn with_policy(policy: watch::Receiver<Option<Arc<Policy>>>) -> Self {
        Self {
            policy,
            ..Self::off()
        }
    }

    /// The same, with this policy.
    pub(crate) fn by_hand_with(policy: watch::Receiver<Option<Arc<Policy>>>) -> (Self, Questions) {
        let (discovery, questions) = Self::by_hand();
        (
            Self {
                policy,
                ..discovery
            },
            questions,
        )
    }

    /// Discovery whose requests the test responds to.
    pub(crate) fn by_hand() -> (Self, Questions) {
        let (sender, requests) = mpsc::channel(MAX_QUEUED_REQUESTS);
        let discovery = Self {
            requests: Some(sender),
            ..Self::off()
        };
        (discovery, Questions(requests))
    }
}
