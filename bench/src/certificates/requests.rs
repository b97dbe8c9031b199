//! Signing requests of many pods, prepared before the measurement, and the catalog with these pods.

use anyhow::{Context, Result};
use diy_mesh_proto::mesh::v1::SignCertificateRequest;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use serde_json::{Value, json};

use crate::tokens::{Issuer, Pod};

/// Number of namespaces; all pods of one namespace have the same identity.
const NAMESPACES: usize = 50;

/// Creates `count` requests of different pods, and these pods.
pub fn prepare(count: usize) -> Result<(Vec<SignCertificateRequest>, Vec<Value>)> {
    let issuer = Issuer::new()?;
    let pods: Vec<Pod> = (0..count).map(pod).collect();
    let requests = pods
        .iter()
        .map(|pod| sign_request(pod, &issuer))
        .collect::<Result<_>>()?;
    let numbered = pods.iter().enumerate();
    let manifests = numbered.map(|(number, pod)| manifest(number, pod));
    Ok((requests, manifests.collect()))
}

fn pod(number: usize) -> Pod {
    let namespace = format!("shop-{}", number % NAMESPACES);
    Pod {
        name: format!("till-6d4cf56db6-{number:05}"),
        namespace,
        uid: format!("00000000-0000-4000-8000-{number:012}"),
    }
}

fn sign_request(pod: &Pod, issuer: &Issuer) -> Result<SignCertificateRequest> {
    let user = pod.user();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params
        .distinguished_name
        .push(DnType::CommonName, user.as_str());
    let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).context("generate a key")?;
    let csr = params
        .serialize_request(&key)
        .and_then(|request| request.pem())
        .context("create a certificate signing request")?;
    Ok(SignCertificateRequest {
        name: user,
        token: issuer.token(pod)?,
        csr: csr.into(),
    })
}

/// Pod manifest. The pod IP only matters for the lookup of the client address.
fn manifest(number: usize, pod: &Pod) -> Value {
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
        },
        "spec": { "serviceAccountName": pod.namespace, "containers": [{ "name": "till", "image": "till" }],
            "initContainers": [{ "name": "proxy", "env": [{ "name": "SERVICE_MESH_TOKEN_FILE" }] }] },
        "status": {
            "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }],
            "conditions": [{ "type": "Ready", "status": "False" }],
        },
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn requests_have_distinct_tokens_and_keys() {
        let (requests, pods) = prepare(120).unwrap();
        assert_eq!(
            requests
                .iter()
                .map(|request| &request.token)
                .collect::<HashSet<_>>()
                .len(),
            120
        );
        assert_eq!(
            requests
                .iter()
                .map(|request| &request.csr)
                .collect::<HashSet<_>>()
                .len(),
            120
        );
        assert_eq!(
            requests
                .iter()
                .map(|request| &request.name)
                .collect::<HashSet<_>>()
                .len(),
            NAMESPACES
        );
        assert_eq!(pods.len(), 120);
    }
}
