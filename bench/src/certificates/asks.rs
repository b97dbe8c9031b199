//! What the proxies of many pods ask, made before the clock starts; and the catalog that has these pods.

use anyhow::{Context, Result};
use diy_mesh_proto::mesh::v1::SignCertificateRequest;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::json;

use crate::tokens::{Issuer, Pod};

/// Pods of one namespace have one identity.
const NAMESPACES: usize = 50;

/// One pod's request, with its token and that of its key.
pub type Ask = SignCertificateRequest;

/// So many, each of another pod, and the catalog.
pub fn prepare(count: usize) -> Result<(Vec<Ask>, String)> {
    let issuer = Issuer::new()?;
    let pods: Vec<Pod> = (0..count).map(pod).collect();
    let asks = pods
        .iter()
        .map(|pod| ask(pod, &issuer))
        .collect::<Result<_>>()?;
    let catalog: Vec<String> = pods
        .iter()
        .enumerate()
        .map(|(number, pod)| manifest(number, pod))
        .collect();
    Ok((asks, catalog.join("\n---\n")))
}

fn pod(number: usize) -> Pod {
    let namespace = format!("shop-{}", number % NAMESPACES);
    Pod {
        name: format!("till-6d4cf56db6-{number:05}"),
        namespace,
        uid: format!("00000000-0000-4000-8000-{number:012}"),
    }
}

fn ask(pod: &Pod, issuer: &Issuer) -> Result<Ask> {
    let user = pod.user();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, user.as_str());
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).context("make a key")?;
    let csr = params
        .serialize_request(&key)
        .and_then(|request| request.pem())
        .context("make a certificate signing request")?;
    Ok(Ask {
        name: user,
        token: issuer.token(pod)?,
        csr: csr.into(),
    })
}

/// Nobody asks from these addresses: whose the address is that asks is looked up all the same.
fn manifest(number: usize, pod: &Pod) -> String {
    let address = format!(
        "10.{}.{}.{}",
        128 + number / 65_536,
        number / 256 % 256,
        number % 256
    );
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": pod.name, "namespace": pod.namespace, "uid": pod.uid,
            "annotations": { "diy-service-mesh/inject": "true", "diy-service-mesh/status": "injected" },
        },
        "spec": { "serviceAccountName": pod.namespace, "containers": [{ "name": "till", "image": "till" }] },
        "status": {
            "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [{ "type": "Ready", "status": "False" }],
        },
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_asks_for_itself() {
        let (asks, catalog) = prepare(120).unwrap();
        assert_eq!(
            asks.iter()
                .map(|ask| &ask.token)
                .collect::<HashSet<_>>()
                .len(),
            120
        );
        assert_eq!(
            asks.iter()
                .map(|ask| &ask.csr)
                .collect::<HashSet<_>>()
                .len(),
            120
        );
        assert_eq!(
            asks.iter()
                .map(|ask| &ask.name)
                .collect::<HashSet<_>>()
                .len(),
            NAMESPACES
        );
        assert_eq!(
            catalog
                .lines()
                .filter(|line| line.contains("\"kind\":\"Pod\""))
                .count(),
            120
        );
    }
}
