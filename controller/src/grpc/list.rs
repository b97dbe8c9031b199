//! The calls of `mesh.proto`; here those for people and tools, whose names begin with Get or Watch. A caller gets what is in the
//! namespaces whose pods it may list. Answers come in pages and are charged to the caller until they
//! have been sent.

use std::collections::BTreeSet;
use std::ops::Bound;
use std::sync::Arc;

use diy_mesh_control_plane::clock::Finding;
use diy_mesh_proto::mesh::v1 as proto;
use diy_mesh_runtime::metrics::Active;
use futures::StreamExt as _;
use prost::Message;
use proto::service_mesh_service_server::ServiceMeshService;
use tokio::time::Instant;
use tonic::{Request, Response, Status, Streaming};

use super::name::parse_key;
use super::watch::{self, Account, Watch};
use super::{Call, Mesh, ResponseStream, message, stream_age};
use crate::authenticate::Namespaces;
use crate::authority::status;
use crate::explain::{self, authorization};
use crate::index::Index;
use crate::kinds::pod::workload::workload;
use crate::object::Key;
use crate::proxies::ConnectedProxy;
use crate::quota::{Charge, SUBSCRIPTION_BYTES};

/// The length of a page, beyond which no further item is added.
const MAX_PAGE_BYTES: usize = 1024 * 1024;
/// The workloads of a page, which have at most about 2 KiB each.
const MAX_PAGE_WORKLOADS: usize = 500;

/// The reports of a page, which have at most 8 KiB each.
const MAX_PAGE_REPORTS: usize = 100;
/// The Services of a pod in such a page.
const MAX_SERVICES: usize = 16;

/// The caller of one of these calls.
struct Viewer {
    call: Arc<Call>,
    namespaces: Namespaces,
    charge: Charge,
    /// The length of the page so far.
    bytes: usize,
}

impl Viewer {
    /// Charges a part of the page.
    fn add(&mut self, bytes: usize) -> Result<(), Status> {
        self.bytes += bytes;
        self.charge.add(bytes)
    }

    /// The messages for these keys until the page is full, and the last key if others follow.
    async fn page<K, T: Message>(
        &mut self,
        keys: impl Iterator<Item = K>,
        mut make: impl FnMut(&K) -> Vec<T>,
    ) -> Result<(Vec<T>, Option<K>), Status> {
        let (mut page, mut keys) = (Vec::new(), keys.peekable());
        while let Some(key) = keys.next() {
            let items = make(&key);
            // Before another page is made in the meantime.
            self.add(items.iter().map(T::encoded_len).sum())?;
            page.extend(items);
            if self.is_full() && keys.peek().is_some() {
                return Ok((page, Some(key)));
            }
            tokio::task::yield_now().await;
        }
        Ok((page, None))
    }

    fn is_full(&self) -> bool {
        self.bytes >= MAX_PAGE_BYTES
    }

    /// The response, which stays charged until it has been sent.
    fn respond<T>(self, response: T) -> Response<T> {
        self.call.unsent.push(self.charge);
        Response::new(response)
    }
}

impl Mesh {
    async fn viewer<T>(&self, request: &Request<T>) -> Result<Viewer, Status> {
        let (caller, call) = self.authenticate(request).await?;
        let authenticator = &self.context.authenticator;
        let namespaces = authenticator
            .namespaces(&caller.user, call.peer.ip())
            .await?;
        let charge = call.peer.charge();
        Ok(Viewer {
            call,
            namespaces,
            charge,
            bytes: 0,
        })
    }
}

#[tonic::async_trait]
impl ServiceMeshService for Mesh {
    async fn sign_certificate(
        &self,
        request: Request<proto::SignCertificateRequest>,
    ) -> Result<Response<proto::SignCertificateResponse>, Status> {
        self.serve_certificate(request).await
    }

    type DiscoverStream = ResponseStream<proto::DiscoverResponse>;

    /// [`MeshServer`](super::MeshServer) calls [`Mesh::serve_discover`] instead.
    async fn discover(
        &self,
        _: Request<Streaming<proto::DiscoverRequest>>,
    ) -> Result<Response<Self::DiscoverStream>, Status> {
        Err(Status::unimplemented("Discover is served as frames"))
    }

    /// A page of Services, in the order of their names.
    async fn get_services(
        &self,
        request: Request<proto::GetServicesRequest>,
    ) -> Result<Response<proto::GetServicesResponse>, Status> {
        let mut viewer = self.viewer(&request).await?;
        let request = request.into_inner();
        let hub = &self.context.hub;
        let mut keys = service_keys(&request.services, &viewer.namespaces)?;
        if keys.is_empty() {
            keys = hub.service_keys();
            keys.retain(|key| viewer.namespaces.contains(&key.namespace));
        }
        let after = match request.page_token.as_str() {
            "" => Bound::Unbounded,
            token => Bound::Excluded(parse_key(token).ok_or_else(|| invalid_token(token))?),
        };
        let keys = keys.range((after, Bound::Unbounded));
        let make = |key: &&Key| vec![message::service(key, hub.service(key))];
        let (services, last) = viewer.page(keys, make).await?;
        Ok(viewer.respond(proto::GetServicesResponse {
            services,
            next_page_token: last.map_or_else(String::new, Key::to_string),
        }))
    }

    type WatchServicesStream = ResponseStream<proto::WatchServicesResponse>;

    /// A stream of Services.
    async fn watch_services(
        &self,
        request: Request<proto::WatchServicesRequest>,
    ) -> Result<Response<Self::WatchServicesStream>, Status> {
        let Viewer {
            call,
            namespaces,
            mut charge,
            ..
        } = self.viewer(&request).await?;
        let keys = service_keys(&request.get_ref().services, &namespaces)?;
        let open = Active::new(&self.context.metrics.watch_streams);
        let watch = Watch::new(&self.context.hub, keys, namespaces);
        // Names are as long as the client wants.
        let names = request.get_ref().encoded_len();
        charge.add(names + watch.pending() * SUBSCRIPTION_BYTES)?;
        let account = Account {
            charge: charge.beside(),
            unsent: call.unsent.clone(),
        };
        let responses = watch::responses(watch, account, self.context.stopping.clone());
        let responses = responses.inspect(move |_| {
            let _until_the_end = (&open, &charge);
        });
        // The permissions of the caller may have changed by then.
        let responses = responses.take_until(tokio::time::sleep(stream_age()));
        Ok(Response::new(Box::pin(responses)))
    }

    /// A page of the ports of a Service, with what happens with the requests to them.
    async fn get_routes(
        &self,
        request: Request<proto::GetRoutesRequest>,
    ) -> Result<Response<proto::GetRoutesResponse>, Status> {
        let mut viewer = self.viewer(&request).await?;
        let request = request.into_inner();
        let key = service_key(&request.service, &viewer.namespaces)?;
        let clients = match request.clients.as_str() {
            "" => &key.namespace,
            clients => clients,
        };
        // Routes of the clients' own namespace may take precedence.
        if !viewer.namespaces.contains(clients) {
            return Err(denied("clients", clients));
        }
        let first: usize = position(&request.page_token)?;
        let hub = &self.context.hub;
        let found = hub.read(|index| {
            let summary = explain::summary(index, &key, clients)?;
            let objects = explain::deciding(index, &key, clients);
            Some((summary, objects, explain::tcp_ports(index, &key)))
        });
        let missing = || Status::not_found(format!("the Service {key} does not exist"));
        let (mut page, mut objects, ports) = found.ok_or_else(missing)?;
        if !request.page_token.is_empty() {
            page = proto::GetRoutesResponse::default();
            objects.clear();
        }
        viewer.add(page.encoded_len())?;
        for id in &objects {
            if viewer.is_full() {
                page.problems
                    .push("others, which are not listed".to_owned());
                break;
            }
            let mut problems = hub.read(|index| explain::problems_of(index, &key, id));
            viewer.add(problems.iter().map(String::len).sum())?;
            page.problems.append(&mut problems);
            tokio::task::yield_now().await;
        }
        for (position, port) in ports.iter().enumerate().skip(first) {
            if viewer.is_full() {
                page.next_page_token = position.to_string();
                break;
            }
            let describe = hub.read(|index| explain::port(index, &key, *port, clients));
            let port = describe();
            viewer.add(port.encoded_len())?;
            page.ports.push(port);
            tokio::task::yield_now().await;
        }
        Ok(viewer.respond(page))
    }

    /// A page of the pods of a target, with who may call them.
    async fn get_authorization(
        &self,
        request: Request<proto::GetAuthorizationRequest>,
    ) -> Result<Response<proto::GetAuthorizationResponse>, Status> {
        let mut viewer = self.viewer(&request).await?;
        let request = request.into_inner();
        let target = named_key("target", &request.target, &viewer.namespaces)?;
        let hub = &self.context.hub;
        let pods = hub.read(|index| authorization::pods(index, &target));
        let missing =
            || Status::not_found(format!("there is no Service, pod or workload {target}"));
        let after = Key::new(&target.namespace, &request.page_token);
        let pods = pods.ok_or_else(missing)?;
        let make = |key: &&Key| {
            let pod = hub.read(|index| authorization::pod(index, &target, request.port, key));
            Vec::from_iter(pod)
        };
        let pods = pods.range((Bound::Excluded(after), Bound::Unbounded));
        let (pods, last) = viewer.page(pods, make).await?;
        Ok(viewer.respond(proto::GetAuthorizationResponse {
            pods,
            next_page_token: last.map_or_else(String::new, |key| key.name.to_string()),
        }))
    }

    /// A page of the workloads that are connected to this replica, with the state of the CA.
    async fn get_identity(
        &self,
        request: Request<proto::GetIdentityRequest>,
    ) -> Result<Response<proto::GetIdentityResponse>, Status> {
        let mut viewer = self.viewer(&request).await?;
        let after = position(&request.get_ref().page_token)?;
        let context = &self.context;
        let (trust_domain, trust) = (&context.trust_domain, context.trust.borrow().clone());
        let (authority, namespaces) = (context.authority.status(), &viewer.namespaces);
        let mut page = status::response(authority, trust_domain, Some(&trust), namespaces);
        page.clocks = match context.authority.clock().verdict().finding {
            Finding::Agreement => String::new(),
            finding => finding.to_string(),
        };
        let page_of_proxies = context.proxies.page(after, MAX_PAGE_WORKLOADS, |proxy| {
            let pod = proxy.pod.as_ref();
            *namespaces == Namespaces::All
                || pod.is_some_and(|pod| namespaces.contains(&pod.namespace))
        });
        if let Some((last, _)) = page_of_proxies.get(MAX_PAGE_WORKLOADS - 1) {
            page.next_page_token = last.to_string();
        }
        let workloads = page_of_proxies.iter();
        page.workloads = workloads
            .map(|(_, proxy)| status::workload(proxy, trust_domain, Some(&trust)))
            .collect();
        viewer.add(page.encoded_len())?;
        Ok(viewer.respond(page))
    }

    /// A page of the edges of pods: whole namespaces, each of which is bounded.
    async fn get_edges(
        &self,
        request: Request<proto::GetEdgesRequest>,
    ) -> Result<Response<proto::GetEdgesResponse>, Status> {
        let mut viewer = self.viewer(&request).await?;
        let proto::GetEdgesRequest {
            namespace,
            page_token,
        } = request.into_inner();
        let is_wanted = |name: &String| match namespace.as_str() {
            "" => viewer.namespaces.contains(name),
            namespace => name == namespace,
        };
        if !namespace.is_empty() && !viewer.namespaces.contains(&namespace) {
            return Err(denied("namespace", &namespace));
        }
        let mut names = self.context.edges.namespaces();
        names.retain(|name| is_wanted(name) && *name > page_token);
        let make = |name: &String| self.context.edges.groups(name);
        let (groups, last) = viewer.page(names.into_iter(), make).await?;
        Ok(viewer.respond(proto::GetEdgesResponse {
            groups,
            next_page_token: last.unwrap_or_default(),
        }))
    }

    /// A page of the latest traffic of the proxies that are connected to this replica.
    async fn get_traffic(
        &self,
        request: Request<proto::GetTrafficRequest>,
    ) -> Result<Response<proto::GetTrafficResponse>, Status> {
        let mut viewer = self.viewer(&request).await?;
        let request = request.into_inner();
        let (context, now) = (&self.context, Instant::now());
        let (namespace, after) = (&*request.namespace, position(&request.page_token)?);
        if !namespace.is_empty() && !viewer.namespaces.contains(namespace) {
            return Err(denied("namespace", namespace));
        }
        if request.watch && context.proxies.watch(namespace, now) {
            context.hub.wake_clients();
        }
        let is_wanted = |proxy: &ConnectedProxy| {
            let reported = proxy.traffic(now).map(|(pod, _)| &*pod.namespace);
            reported.is_some_and(|own| match namespace {
                "" => viewer.namespaces.contains(own),
                namespace => own == namespace,
            })
        };
        let proxies = context.proxies.page(after, MAX_PAGE_REPORTS, is_wanted);
        let last = proxies.get(MAX_PAGE_REPORTS - 1);
        let pods = proxies.iter().filter_map(|(_, proxy)| {
            let read = |index: &Index| traffic(index, proxy, now);
            context.hub.read(read)
        });
        let page = proto::GetTrafficResponse {
            pods: pods.collect(),
            next_page_token: last.map_or_else(String::new, |(last, _)| last.to_string()),
        };
        viewer.add(page.encoded_len())?;
        Ok(viewer.respond(page))
    }
}

/// The traffic of a meshed pod.
fn traffic(
    index: &Index,
    proxy: &ConnectedProxy,
    now: Instant,
) -> Option<proto::get_traffic_response::Pod> {
    let (reported, traffic) = proxy.traffic(now)?;
    let pod = index.meshed_pod(reported)?;
    let label = |name: &str| pod.labels.get(name).map(String::as_str);
    Some(proto::get_traffic_response::Pod {
        namespace: reported.namespace.to_string(),
        name: reported.name.to_string(),
        workload: workload(&reported.name, label).to_owned(),
        traffic: traffic.to_vec(),
        services: (index.services_of(&pod.key).into_iter())
            .take(MAX_SERVICES)
            .map(str::to_owned)
            .collect(),
    })
}

/// Where a page begins, if its token is a number.
fn position<T: Default + std::str::FromStr>(token: &str) -> Result<T, Status> {
    match token {
        "" => Ok(T::default()),
        token => token.parse().map_err(|_| invalid_token(token)),
    }
}

fn invalid_token(token: &str) -> Status {
    Status::invalid_argument(format!(
        "page_token: {token:?} is not a next_page_token of this call"
    ))
}

/// The named Services. All of them are in these namespaces.
fn service_keys(names: &[String], namespaces: &Namespaces) -> Result<BTreeSet<Key>, Status> {
    let keys = names.iter().map(|name| service_key(name, namespaces));
    keys.collect()
}

fn service_key(name: &str, namespaces: &Namespaces) -> Result<Key, Status> {
    named_key("services", name, namespaces)
}

/// A name in one of these namespaces.
fn named_key(field: &str, name: &str, namespaces: &Namespaces) -> Result<Key, Status> {
    let invalid = || format!("{field}: {name:?} is not NAMESPACE/NAME");
    let key = parse_key(name).ok_or_else(|| Status::invalid_argument(invalid()))?;
    if namespaces.contains(&key.namespace) {
        Ok(key)
    } else {
        Err(denied(field, name))
    }
}

fn denied(field: &str, name: &str) -> Status {
    Status::permission_denied(format!(
        "{field}: {name:?} is not in the namespace of your service account, and it may not list the \
         pods of all namespaces"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_names_have_two_parts_and_are_in_a_namespace_of_the_caller() {
        let web = BTreeSet::from([Key::new("shop", "web")]);
        let names = ["shop/web".to_owned()];
        assert_eq!(service_keys(&names, &Namespaces::All).unwrap(), web);
        let of = |namespace: &str| Namespaces::One(namespace.into());
        assert_eq!(service_keys(&names, &of("shop")).unwrap(), web);
        let denied = service_keys(&names, &of("other")).unwrap_err();
        assert_eq!(denied.code(), tonic::Code::PermissionDenied);
        for name in ["", "web", "/web", "shop/", "a/b/c"] {
            let status = service_keys(&[name.to_owned()], &Namespaces::All).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            let message = status.message();
            assert!(message.contains(&format!("{name:?}")), "{message}");
        }
    }
}
