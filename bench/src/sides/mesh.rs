//! Our proxies, with the real controller.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use anyhow::Result;

use super::{
    ADMIN_PORT, INBOUND_PORT, OUTBOUND_PORT, Proxies,
    control::{Workload, roots_file},
    copy_for_proxy_user,
};
use crate::{
    cases::Side,
    config::Programs,
    network::{CONTROL, Namespace, Pair},
    process::{PROXY_UID, Process, Program},
};

/// Starts the proxies of a side and waits until they are ready.
pub(super) fn start(programs: &Programs, pair: &Pair, side: Side) -> Result<Proxies> {
    let proxy = copy_for_proxy_user(&programs.proxy, &programs.state)?;
    let one = |workload: Workload, namespace: &Namespace| {
        let mut process = Process::start(
            program(&proxy, &programs.state, workload, side),
            namespace,
            &programs.state,
        )?;
        let ready = process.wait_ready(
            namespace,
            SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT)),
            "/ready",
        )?;
        anyhow::Ok((process, ready))
    };
    let [has_client, has_server] = side.ends();
    let server = has_server.then(|| one(Workload::Server, &pair.server));
    let server = server.transpose()?;
    let client = has_client.then(|| one(Workload::Client, &pair.client));
    let client = client.transpose()?;
    let ready = client.as_ref().or(server.as_ref()).map(|(_, ready)| *ready);
    Ok(Proxies {
        ends: [client, server].map(|end| end.map(|(process, _)| process)),
        ready: ready.unwrap_or_default(),
    })
}

fn program(proxy: &Path, state: &Path, workload: Workload, side: Side) -> Program {
    let mut arguments = Vec::new();
    for (flag, port) in [
        ("--inbound-port", INBOUND_PORT),
        ("--outbound-port", OUTBOUND_PORT),
        ("--admin-port", ADMIN_PORT),
    ] {
        arguments.extend([flag.to_string(), port.to_string()]);
    }
    arguments.extend(["--workers".to_string(), "1".to_string()]);
    let dump = if side == Side::Dumps { "full" } else { "off" };
    arguments.extend(["--dump".to_string(), dump.to_string()]);
    Program {
        name: format!("{}-proxy-{}", side.name(), workload.name()),
        path: proxy.to_path_buf(),
        arguments,
        environment: vec![
            ("SERVICE_MESH_CONTROLLER", format!("https://{CONTROL}:8080")),
            (
                "SERVICE_MESH_CONTROLLER_IDENTITY",
                "spiffe://cluster.local/ns/service-mesh/sa/controller".to_string(),
            ),
            (
                "SERVICE_MESH_ROOTS_FILE",
                roots_file(state).to_string_lossy().into_owned(),
            ),
            (
                "SERVICE_MESH_TOKEN_FILE",
                workload.token_file(state).to_string_lossy().into_owned(),
            ),
            ("POD_NAME", workload.name().to_string()),
            ("POD_NAMESPACE", workload.name().to_string()),
        ],
        uid: PROXY_UID,
    }
}
