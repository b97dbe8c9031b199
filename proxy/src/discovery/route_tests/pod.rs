//! The pod of an application with its proxy. A test configures the proxy as the controller does,
//! and callers have connections to it.

use diy_mesh_model::identity::Identity;
use proto::workload::InboundMode;

use super::super::own_pod::{OwnPod, Received};
use super::super::position::Position;
use super::*;
use crate::inbound::policy::Policy;
use crate::secure::identity::testing::Authority;
use crate::secure::tls::tests::{CART, credentials};

/// A pod of the namespace `shop`.
pub(super) struct Pod {
    pub(super) worker: Rc<Worker>,
    pub(super) own: OwnPod,
    app: SocketAddr,
}

impl Pod {
    pub(super) fn new(app: SocketAddr) -> Self {
        Self::with(app, |context| context)
    }

    /// A pod whose worker has other inputs.
    pub(super) fn with(
        app: SocketAddr,
        change: impl FnOnce(WorkerContext) -> WorkerContext,
    ) -> Self {
        Self::of_settings(app, Policy::default(), change)
    }

    /// A pod with these settings.
    pub(super) fn of_settings(
        app: SocketAddr,
        settings: Policy,
        change: impl FnOnce(WorkerContext) -> WorkerContext,
    ) -> Self {
        let (sender, policy) = watch::channel(None);
        let own = credentials(&Authority::new("root"), CART, |_| {});
        let worker = Worker::new(change(WorkerContext {
            discovery: Discovery::with_policy(policy),
            credentials: watch::channel(Some(own)).1,
            ..WorkerContext::for_a_test("")
        }));
        let own = OwnPod::new(settings, sender);
        let maintained = worker.clone();
        tokio::task::spawn_local(async move { maintained.maintain_until_drained().await });
        Self { worker, own, app }
    }

    /// Applies a message of the controller for a permissive pod. Returns the rejection.
    pub(super) async fn configure(&mut self, workload: proto::Workload) -> String {
        let version = self.worker.policy_version();
        let received = Received {
            workload: proto::Workload {
                inbound_mode: InboundMode::Permissive.into(),
                ..workload
            },
            version: "1".to_owned(),
            position: Position::default(),
        };
        let now = tokio::time::Instant::now();
        let acknowledgement = self.own.receive(received, now).unwrap();
        let rejection = acknowledgement.rejection;
        if rejection.is_empty() {
            until(|| self.worker.policy_version() > version).await;
        }
        rejection
    }

    /// A connection of a service account, of the namespace `shop` unless it is NAMESPACE/ACCOUNT.
    pub(super) async fn connect(&self, account: Option<&str>) -> TcpStream {
        let identity = |account: &str| {
            let (namespace, account) = account.split_once('/').unwrap_or(("shop", account));
            Identity::new("cluster.local", namespace, account).unwrap()
        };
        let caller = account.map_or(Caller::Unauthenticated, |account| {
            Caller::Peer(Arc::new(identity(account)))
        });
        self.connect_as(Direction::Inbound, caller).await
    }

    /// A connection to the application of the test.
    pub(super) async fn connect_as(&self, direction: Direction, caller: Caller) -> TcpStream {
        let app = Backend::alone(self.app);
        self.carried(direction, caller, app).await
    }

    /// A connection to a destination.
    pub(super) async fn carried(
        &self,
        direction: Direction,
        caller: Caller,
        destination: Rc<Backend>,
    ) -> TcpStream {
        let (client, stream) = connected().await;
        let flow = Flow {
            called_by: Default::default(),
            counted: Default::default(),
            slot: self.worker.slot(),
            worker: self.worker.clone(),
            direction,
            peer: stream.peer_addr().unwrap(),
            original: destination.address().unwrap(),
            destination,
            caller,
        };
        tokio::task::spawn_local(carry(Io::new(stream), flow));
        client
    }

    /// Sends a request on a connection of its own.
    pub(super) async fn http1(&self, account: Option<&str>, path: &str) -> String {
        let mut client = self.connect(account).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n");
        client.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        response
    }

    pub(super) async fn http2(
        &self,
        account: Option<&str>,
        request: Request<()>,
    ) -> http::HeaderMap {
        let connection = self.connect(account).await;
        let (mut client, connection) = h2::client::handshake(connection).await.unwrap();
        tokio::task::spawn_local(connection);
        let (response, _) = client.send_request(request, true).unwrap();
        response.await.unwrap().into_parts().0.headers
    }
}
