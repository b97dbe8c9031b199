//! The translation of cluster addresses in the node's namespace, as kube-proxy does it: one table of
//! nftables, which the kernel replaces as a whole.

use std::{collections::BTreeSet, net::SocketAddr};

use anyhow::{Result, anyhow};
use diy_mesh_proxy_init::nftables::{
    encoding::{self, Hook},
    netlink::Batch,
};

use super::{links::host, services::RANGES};

const TABLE: &str = "sandbox";

/// The translation of packets to a port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Translation {
    pub(super) service: SocketAddr,
    /// The number of the transport protocol.
    pub(super) protocol: u8,
    /// They get equal shares.
    pub(super) targets: Vec<SocketAddr>,
}

/// Replaces the table.
pub(super) fn load(translations: &[Translation]) -> Result<()> {
    let mut batch = Batch::begin();
    encoding::replace_table(&mut batch, TABLE);
    for chain in ["prerouting", "output"] {
        add_chain(&mut batch, chain, ("nat", chain, -100));
        for translation in translations {
            translation.add_rules(&mut batch, chain);
        }
    }
    // A pod that reaches itself through its own Service must see another source address than its
    // own.
    add_chain(&mut batch, "postrouting", ("nat", "postrouting", 100));
    let targets = translations.iter().flat_map(|one| &one.targets);
    for address in targets.map(SocketAddr::ip).collect::<BTreeSet<_>>() {
        let what = format!("masquerade of {address}");
        encoding::add_rule(&mut batch, TABLE, "postrouting", what, |rule| {
            encoding::source(rule, address);
            encoding::destination(rule, address, host(address).1);
            encoding::expression(rule, "masq", |_| {});
        });
    }
    // Packets that still have a cluster IP as destination belong to a Service without endpoints.
    for (chain, hook) in [("forwarded", "forward"), ("sent", "output")] {
        add_chain(&mut batch, chain, ("filter", hook, 0));
        for (address, prefix) in RANGES {
            let what = format!("rejection of {address}/{prefix}");
            encoding::add_rule(&mut batch, TABLE, chain, what, |rule| {
                encoding::destination(rule, address, prefix);
                encoding::reject(rule);
            });
        }
    }
    batch.end();
    let result = batch.send();
    result.map_err(|(what, errno)| anyhow!("the kernel rejected the {what}: {errno}"))
}

fn add_chain(batch: &mut Batch, chain: &str, hook: (&'static str, &'static str, i32)) {
    let (kind, name, priority) = hook;
    let hook = Hook {
        kind,
        name,
        priority,
    };
    encoding::add_chain(batch, TABLE, chain, hook);
}

impl Translation {
    fn add_rules(&self, batch: &mut Batch, chain: &str) {
        let (service, count) = (self.service, self.targets.len());
        for (number, target) in self.targets.iter().enumerate() {
            let what = format!("translation of {service} to {target}");
            encoding::add_rule(batch, TABLE, chain, what, |rule| {
                encoding::destination(rule, service.ip(), host(service.ip()).1);
                encoding::port(rule, self.protocol, service.port());
                // Each of the remaining targets gets the same share.
                encoding::one_of(rule, count - number);
                encoding::translate(rule, *target);
            });
        }
    }
}
