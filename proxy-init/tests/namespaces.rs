//! proxy-init in real network namespaces, with nftables and with both backends of iptables: the loaded
//! rules, and the resulting redirects.

mod support;

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::Command;

use diy_mesh_proxy_init::nftables;
use diy_mesh_proxy_init::rules::{Chain, Condition, Packets, Rule, Verdict};
use nix::sys::socket::{setsockopt, sockopt::BindToDevice};
use support::{
    Namespace, PROXY_INIT, backend_programs, has_means, programs, receive, script, text,
};

const FLAGS: [&str; 8] = [
    "--inbound-port",
    "4000",
    "--outbound-port",
    "5000",
    "--admin-port",
    "4001",
    "--proxy-uid",
    "1337",
];
const SKIPS: [&str; 4] = [
    "--skip-inbound-ports",
    "25,9000-9100",
    "--skip-outbound-ports",
    "3306",
];
/// The backends of iptables.
const IPTABLES: [&str; 2] = ["nft", "legacy"];
const BACKENDS: [&str; 3] = ["nftables", "nft", "legacy"];
const LIST_TABLE: &str = "nft -y list table inet diy-service-mesh";

#[test]
fn loads_golden_rules_and_is_idempotent() {
    if !has_means() {
        return;
    }
    for name in IPTABLES {
        let (namespace, programs) = (Namespace::new(), backend_programs(name));
        succeed(
            &namespace,
            &[&FLAGS[..], &SKIPS[..], &["--iptables"]].concat(),
            programs.path(),
        );
        let once = both_families(&namespace, name, "nat");
        for (saved, golden) in once.iter().zip([
            include_str!("golden/ipv4.rules"),
            include_str!("golden/ipv6.rules"),
        ]) {
            assert_eq!(rules(saved), rules(golden), "{name}");
        }
        succeed(
            &namespace,
            &[&FLAGS[..], &SKIPS[..], &["--iptables"]].concat(),
            programs.path(),
        );
        assert_eq!(both_families(&namespace, name, "nat"), once, "{name}");
    }
}

#[test]
fn replaces_own_rules_and_keeps_foreign_rules() {
    if !has_means() {
        return;
    }
    for name in IPTABLES {
        let (namespace, programs) = (Namespace::new(), backend_programs(name));
        let before = format!("iptables-{name}");
        namespace.run(move || {
            let others = [
                "-t nat -N OTHERS",
                "-t nat -A PREROUTING -p udp -j OTHERS",
                "-t nat -A OUTPUT -p tcp --dport 99 -j ACCEPT",
            ];
            // Wrong jumps of an earlier version: without -p tcp, and duplicate.
            let ours = [
                "-t nat -N PROXY_INBOUND",
                "-t nat -A PREROUTING -j PROXY_INBOUND",
                "-t nat -A PREROUTING -j PROXY_INBOUND",
            ];
            for args in others.iter().chain(&ours) {
                assert!(
                    Command::new(&before)
                        .args(args.split(' '))
                        .status()
                        .expect("the program starts")
                        .success()
                );
            }
        });
        succeed(
            &namespace,
            &[&FLAGS[..], &SKIPS[..], &["--iptables"]].concat(),
            programs.path(),
        );
        succeed(&namespace, &with_backend("nft"), programs.path());
        let saved = namespace.saved(&format!("iptables-{name}-save"), "nat");
        for line in [
            "-A PREROUTING -p udp -j OTHERS\n",
            "-A OUTPUT -p tcp -m tcp --dport 99 -j ACCEPT\n",
        ] {
            assert!(saved.contains(line), "{name}: {saved}");
        }
        assert_eq!(
            saved.matches("-j PROXY_INBOUND\n").count(),
            1,
            "{name}: {saved}"
        );
        assert!(
            saved.contains("-A PREROUTING -p tcp -j PROXY_INBOUND\n")
                && !saved.contains("multiport"),
            "{name}: {saved}"
        );
    }
}

#[test]
fn loads_golden_table_and_is_idempotent() {
    if !has_means() {
        return;
    }
    let resolv_conf = "nameserver 10.96.0.10\nnameserver fd00::a\nnameserver 10.96.0.11\n";
    let (namespace, nothing) = (Namespace::new(), programs(&[]));
    let args = [&FLAGS[..], &SKIPS[..]].concat();
    for _ in 0..2 {
        succeed(&namespace, &args, nothing.path());
        let golden = include_str!("golden/nftables.rules");
        assert_eq!(namespace.output(LIST_TABLE), golden);
        let output = namespace.proxy_init_with_dns(resolv_conf, &args, nothing.path());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let golden = include_str!("golden/dns-nftables.rules");
        assert_eq!(namespace.output(LIST_TABLE), golden);
    }
}

#[test]
fn replaces_own_table_and_keeps_foreign_rules() {
    if !has_means() {
        return;
    }
    let (pod, peer) = pod_and_peer();
    peer.serve(80, "peer");
    for (port, word) in [(5000, "outbound"), (9999, "others")] {
        pod.serve(port, word);
    }
    // An earlier table of ours, a table of others, and redirects of others in iptables, which come
    // after ours.
    for command in [
        "nft add table inet diy-service-mesh",
        "nft add chain inet diy-service-mesh stale { type filter hook output priority 0 ; }",
        "nft add rule inet diy-service-mesh stale tcp dport 80 drop",
        "nft add table inet others",
        "nft add chain inet others output { type filter hook output priority 0 ; }",
        "iptables-nft -t nat -A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 9999",
        "ip6tables-nft -t nat -A OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 9999",
    ] {
        pod.output(command);
    }
    let others = || {
        let tables = ["inet others", "ip nat", "ip6 nat"];
        tables.map(|table| pod.output(&format!("nft list table {table}")))
    };
    let before = others();
    succeed(&pod, &FLAGS, programs(&[]).path());
    assert_eq!(others(), before);
    let own = pod.output(LIST_TABLE);
    assert!(!own.contains("stale"), "{own}");
    for (_, _, peer_ip) in addresses() {
        assert_eq!(pod.request(peer_ip, 80), "outbound");
    }
}

#[test]
fn names_rejected_rule_and_keeps_the_table() {
    if !has_means() {
        return;
    }
    let namespace = Namespace::new();
    succeed(&namespace, &FLAGS, programs(&[]).path());
    let before = namespace.output(LIST_TABLE);
    // The kernel redirects in chains of type nat only.
    let redirect = Rule {
        conditions: vec![Condition::User(7)],
        verdict: Verdict::Redirect(4000),
    };
    let accepted = Rule {
        conditions: vec![Condition::ToLoopback],
        verdict: Verdict::Return,
    };
    let chains = [Chain {
        packets: Packets::OutboundUdp,
        rules: vec![accepted.clone(), redirect, accepted],
    }];
    let error = namespace.run(move || nftables::apply(&chains)).unwrap_err();
    let expected = "rule `meta skuid 7 redirect to :4000` of chain outbound-udp";
    assert!(error.to_string().starts_with(expected), "{error}");
    assert_eq!(namespace.output(LIST_TABLE), before);
}

#[test]
fn sets_a_table_with_net_admin_only() {
    if !has_means() {
        return;
    }
    for (capabilities, expected) in [
        (
            "-all,+net_admin",
            "IPv4 and IPv6: set by nftables\ncode 0\n",
        ),
        (
            "-all",
            "proxy-init: cannot set the redirect rules: rules rejected: EPERM: Operation not permitted; \
             the container needs the capability NET_ADMIN\ncode 1\n",
        ),
    ] {
        let script = format!(
            "setpriv --bounding-set={capabilities} --no-new-privs {PROXY_INIT} {} 2>&1; echo code $?",
            FLAGS.join(" ")
        );
        let output = Command::new("unshare")
            .args(["-n", "sh", "-c", &script])
            .output()
            .expect("the program starts");
        let report = text(&output.stdout);
        assert!(report.ends_with(expected), "{report}");
    }
}

#[test]
fn skips_twenty_thousand_ports() {
    if !has_means() {
        return;
    }
    let list: Vec<_> = (1..20_000).map(|n| (n * 2).to_string()).collect();
    let list = list.join(",");
    let args = [&FLAGS[..], &["--skip-inbound-ports", &list]].concat();
    let namespace = Namespace::new();
    succeed(&namespace, &args, programs(&[]).path());
    let listed = namespace.output(LIST_TABLE);
    assert_eq!(listed.matches("tcp dport").count(), 20_002);
}

#[test]
fn redirects_tcp_connections() {
    if !has_means() {
        return;
    }
    for name in BACKENDS {
        let (pod, peer) = pod_and_peer();
        for (port, word) in [
            (4000, "inbound"),
            (5000, "outbound"),
            (4001, "admin"),
            (8080, "app"),
            (25, "app"),
            (9050, "app"),
        ] {
            pod.serve(port, word);
        }
        for port in [80, 3306] {
            peer.serve(port, "peer");
        }
        succeed(
            &pod,
            &[&with_backend(name)[..], &SKIPS].concat(),
            backend_programs(name).path(),
        );
        for (family, pod_ip, peer_ip) in addresses() {
            let responses = [8080, 80, 4001, 25, 9050, 5000].map(|port| peer.request(pod_ip, port));
            assert_eq!(
                responses,
                ["inbound", "inbound", "admin", "app", "app", "inbound"],
                "inbound, {name} {family}"
            );
            let responses = [80, 8080, 3306].map(|port| pod.request(peer_ip, port));
            assert_eq!(
                responses,
                ["outbound", "outbound", "peer"],
                "outbound, {name} {family}"
            );
            assert_eq!(
                pod.request_as(1337, peer_ip, 80),
                "peer",
                "the proxy's own, {name} {family}"
            );
            assert_eq!(
                pod.request_as(1338, peer_ip, 80),
                "outbound",
                "another user's, {name} {family}"
            );
            assert_eq!(
                pod.request(pod_ip, 8080),
                "app",
                "the pod itself by its own address, {name} {family}"
            );
            assert_eq!(
                pod.request_as(1337, pod_ip, 8080),
                "app",
                "the proxy to the app, {name} {family}"
            );
        }
        assert_eq!(pod.request(Ipv4Addr::LOCALHOST, 8080), "app", "{name}");
        assert_eq!(
            pod.request(Ipv4Addr::new(127, 9, 9, 9), 8080),
            "app",
            "{name}"
        );
        assert_eq!(pod.request(Ipv6Addr::LOCALHOST, 8080), "app", "{name}");
        for loopback in [
            Ipv4Addr::LOCALHOST.into(),
            IpAddr::from(Ipv6Addr::LOCALHOST),
        ] {
            assert_eq!(
                pod.request_as(1337, loopback, 4000),
                "outbound",
                "the probe of the proxy, {name}"
            );
            assert_eq!(pod.request(loopback, 4000), "inbound", "{name}");
            assert_eq!(pod.request_as(1337, loopback, 4001), "admin", "{name}");
        }
    }
}

#[test]
fn does_not_redirect_udp() {
    if !has_means() {
        return;
    }
    for name in BACKENDS {
        let (pod, peer) = pod_and_peer();
        succeed(&pod, &with_backend(name), backend_programs(name).path());
        for (family, pod_ip, peer_ip) in addresses() {
            let (pod_socket, peer_socket) = (pod.udp(pod_ip, 8080), peer.udp(peer_ip, 53));
            pod_socket
                .send_to(b"question", (peer_ip, 53))
                .expect("sent");
            let question = (b"question".to_vec(), (pod_ip, 8080).into());
            assert_eq!(receive(&peer_socket), question, "{name} {family}");
            peer.udp(peer_ip, 54)
                .send_to(b"other", (pod_ip, 8080))
                .expect("sent");
            assert_eq!(receive(&pod_socket).0, b"other", "{name} {family}");
        }
    }
}

#[test]
fn restricts_udp_by_golden_rules_and_removes_them_again() {
    if !has_means() {
        return;
    }
    let resolv_conf = "nameserver 10.96.0.10\nnameserver fd00::a\nnameserver 10.96.0.11\n";
    let args = [&FLAGS[..], &SKIPS[..], &["--iptables"]].concat();
    for name in IPTABLES {
        let (namespace, programs) = (Namespace::new(), backend_programs(name));
        let other = format!("iptables-{name}");
        namespace.run(move || {
            let args = "-A OUTPUT -p udp --dport 99 -j ACCEPT".split(' ');
            let status = Command::new(&other).args(args).status();
            assert!(status.expect("the program starts").success());
        });
        for _ in 0..2 {
            let output = namespace.proxy_init_with_dns(resolv_conf, &args, programs.path());
            assert!(output.status.success(), "{}", text(&output.stderr));
            let saved = ["filter", "nat"].map(|table| both_families(&namespace, name, table));
            for (family, golden) in [
                include_str!("golden/dns-ipv4.rules"),
                include_str!("golden/dns-ipv6.rules"),
            ]
            .into_iter()
            .enumerate()
            {
                let (filter, nat) = golden.split_once("*nat").expect("two tables");
                let foreign = "-A OUTPUT -p udp -m udp --dport 99 -j ACCEPT";
                let mut own = rules(&saved[0][family]);
                own.retain(|line| *line != foreign);
                assert_eq!(own, rules(filter), "{name}");
                assert_eq!(rules(&saved[1][family]), rules(nat), "{name}");
            }
            assert!(saved[0][0].contains("--dport 99 -j ACCEPT"), "{saved:?}");
        }
        succeed(&namespace, &args, programs.path());
        let filter = both_families(&namespace, name, "filter");
        assert!(!filter.concat().contains("PROXY_UDP"), "{name}: {filter:?}");
        assert!(filter[0].contains("--dport 99 -j ACCEPT"), "{filter:?}");
        let nat = both_families(&namespace, name, "nat");
        let golden = include_str!("golden/ipv4.rules");
        assert_eq!(rules(&nat[0]), rules(golden), "{name}");
    }
}

#[test]
fn udp_reaches_only_resolvers_clients_and_the_pod_itself() {
    if !has_means() {
        return;
    }
    for name in BACKENDS {
        let (pod, peer) = pod_and_peer();
        // The other address of the peer is no resolver.
        for address in ["10.123.0.9/24", "fd00:123::9/64"] {
            peer.add_address(address);
        }
        let resolv_conf = "nameserver 10.123.0.1\nnameserver fd00:123::1%eth0\n";
        let output = pod.proxy_init_with_dns(
            resolv_conf,
            &with_backend(name),
            backend_programs(name).path(),
        );
        let report = text(&output.stdout);
        let expected = "\noutbound UDP is refused, except: loopback, replies, the proxy's own (uid 1337), \
                        DNS to the nameservers [10.123.0.1, fd00:123::1]\n";
        assert!(report.contains(expected), "{output:?}");
        for (family, pod_ip, peer_ip) in addresses() {
            let what = format!("{name} {family}");
            let (client, resolver) = (pod.udp(pod_ip, 8081), peer.udp(peer_ip, 53));
            client.send_to(b"question", (peer_ip, 53)).expect("sent");
            let question = (b"question".to_vec(), (pod_ip, 8081).into());
            assert_eq!(receive(&resolver), question, "{what}");
            resolver.send_to(b"answer", (pod_ip, 8081)).expect("sent");
            assert_eq!(receive(&client).0, b"answer", "{what}");

            let (server, https) = (pod.udp(pod_ip, 8080), peer.udp(peer_ip, 443));
            https.send_to(b"request", (pod_ip, 8080)).expect("sent");
            assert_eq!(receive(&server).0, b"request", "{what}");
            server.send_to(b"reply", (peer_ip, 443)).expect("sent");
            assert_eq!(receive(&https).0, b"reply", "{what}");

            // The request to port 8080 permits replies of that port only.
            let other = if family == "IPv4" {
                "10.123.0.9"
            } else {
                "fd00:123::9"
            };
            let other: IpAddr = other.parse().expect("an address");
            for to in [(peer_ip, 443), (peer_ip, 54), (other, 53)] {
                let refused = |result: io::Result<usize>| {
                    let error = result.expect_err(&what).kind();
                    assert_eq!(error, ErrorKind::PermissionDenied, "{what} {to:?}");
                };
                refused(client.send_to(b"refused", to));
                let connected = pod.udp(pod_ip, 0);
                connected.connect(to).expect("a route");
                refused(connected.send(b"refused"));
                let bound = pod.udp(pod_ip, 0);
                setsockopt(&bound, BindToDevice, &"eth0".into()).expect("permitted");
                refused(bound.send_to(b"refused", to));
            }
            assert!(!pod.sends_udp_as(1338, peer_ip, 443), "{what}");
            assert!(pod.sends_udp_as(1337, peer_ip, 443), "{what}");
            assert_eq!(receive(&https).0, b"user", "{what}");

            let sibling = pod.udp(pod_ip, 8082);
            client.send_to(b"sibling", (pod_ip, 8082)).expect("sent");
            assert_eq!(receive(&sibling).0, b"sibling", "{what}");
        }
        for loopback in [
            Ipv4Addr::LOCALHOST.into(),
            IpAddr::from(Ipv6Addr::LOCALHOST),
        ] {
            let (server, client) = (pod.udp(loopback, 443), pod.udp(loopback, 0));
            client.send_to(b"loopback", (loopback, 443)).expect("sent");
            assert_eq!(receive(&server).0, b"loopback", "{name}");
        }
    }
}

#[test]
fn invalid_resolv_conf_fails_and_changes_nothing() {
    if !has_means() {
        return;
    }
    let (namespace, programs) = (Namespace::new(), programs(&[]));
    let output =
        namespace.proxy_init_with_dns("search x\nnameserver dns\n", &FLAGS, programs.path());
    let expected = "proxy-init: cannot restrict outbound UDP to DNS: line 2 of /etc/resolv.conf: \
                    nameserver \"dns\", expected an IP address; correct dnsConfig of the pod or \
                    the resolv.conf of its node, or set the annotation diy-service-mesh/outbound-udp to all\n";
    assert_eq!(
        (output.status.code(), &*text(&output.stderr)),
        (Some(1), expected)
    );
    assert_eq!(namespace.output("nft list ruleset"), "");
}

#[test]
fn skips_sixty_port_ranges() {
    if !has_means() {
        return;
    }
    let list: Vec<_> = (0..60)
        .map(|n| format!("{}-{}", 10_000 + n * 10, 10_001 + n * 10))
        .collect();
    for name in BACKENDS {
        let (pod, peer) = pod_and_peer();
        for (port, word) in [
            (4000, "inbound"),
            (10_001, "app"),
            (10_591, "app"),
            (10_592, "app"),
        ] {
            pod.serve(port, word);
        }
        succeed(
            &pod,
            &[
                &with_backend(name)[..],
                &["--skip-inbound-ports", &list.join(",")],
            ]
            .concat(),
            backend_programs(name).path(),
        );
        let (_, pod_ip, _) = addresses()[0];
        assert_eq!(
            [10_001, 10_591, 10_592].map(|port| peer.request(pod_ip, port)),
            ["app", "app", "inbound"],
            "{name}"
        );
    }
}

#[test]
fn finds_standalone_and_multi_call_programs() {
    if !has_means() {
        return;
    }
    let plain = [
        "iptables-save",
        "iptables-restore",
        "ip6tables-save",
        "ip6tables-restore",
    ]
    .map(|name| (name, "xtables-nft-multi"));
    for (links, expected) in [
        (
            vec![("xtables-nft-multi", "xtables-nft-multi")],
            "iptables-nft",
        ),
        (
            vec![("xtables-legacy-multi", "xtables-legacy-multi")],
            "iptables-legacy",
        ),
        (plain.to_vec(), "iptables"),
    ] {
        let (namespace, folder) = (Namespace::new(), programs(&links));
        let report = succeed(&namespace, &with_backend("nft"), folder.path());
        assert!(
            report.contains(&format!(
                "IPv4: set by {expected}\nIPv6: set by {}\n",
                expected.replace("ip", "ip6")
            )),
            "{report}"
        );
    }
}

#[test]
fn falls_back_to_next_backend() {
    if !has_means() {
        return;
    }
    let (namespace, folder) = (Namespace::new(), backend_programs("legacy"));
    for family in ["iptables", "ip6tables"] {
        script(
            folder.path(),
            &format!("{family}-nft-save"),
            "echo 'Could not fetch rule set generation id' >&2; exit 4",
        );
    }
    let report = succeed(&namespace, &with_backend("nft"), folder.path());
    assert!(
        report.ends_with("IPv4: set by iptables-legacy\nIPv6: set by ip6tables-legacy\n"),
        "{report}"
    );
}

#[test]
fn names_rejected_rule_and_changes_nothing() {
    if !has_means() {
        return;
    }
    // A user namespace with root as its only user: the kernel rejects owner rules for unmapped
    // users.
    let script = format!(
        "ip link set lo up; {PROXY_INIT} {} 2>&1; echo code $?; iptables-NAME-save",
        with_backend("nft").join(" ")
    );
    let dns = script.replacen("2>&1", "--outbound-udp=dns 2>&1", 1);
    let probe = "-d 127.0.0.1/32 -p tcp -m tcp --dport 4000 -m owner --uid-owner 1337 -j REDIRECT --to-ports 5000";
    let scripts = [
        (script, "PROXY_OUTBOUND", probe),
        (dns, "PROXY_UDP", "-m owner --uid-owner 1337 -j RETURN"),
    ];
    let scripts = scripts.iter();
    for ((script, chain, rejected), name) in
        scripts.flat_map(|one| IPTABLES.map(|name| (one, name)))
    {
        let programs = backend_programs(name);
        let script = script.replace("NAME", name).replace(
            PROXY_INIT,
            &format!("PATH={} {PROXY_INIT}", programs.path().display()),
        );
        let output = Command::new("unshare")
            .args(["-Urn", "sh", "-c", &script])
            .output()
            .expect("the program starts");
        let stdout = text(&output.stdout);
        let (report, saved) = stdout
            .split_once("code 1\n")
            .unwrap_or_else(|| panic!("proxy-init did not fail: {stdout}"));
        let rule = format!("rule `-A {chain} {rejected}` rejected: ");
        assert!(
            report.starts_with(&format!(
                "proxy-init: cannot set the IPv4 rules: iptables-{name}: {rule}"
            )),
            "{report}"
        );
        assert_eq!(report.lines().count(), 1, "{report}");
        assert!(!saved.contains("PROXY_"), "{saved}");
    }
}

#[test]
fn works_with_read_only_root_and_two_capabilities() {
    if !has_means() {
        return;
    }
    for name in IPTABLES {
        // Disables the other backend. The checkout may be in a directory that the mounts hide, so
        // that the program is opened before them.
        let other = if name == "nft" { "legacy" } else { "nft" };
        let script = format!(
            "set -e; exec 9<{PROXY_INIT}; mount --make-rprivate /; mount --bind /dev/null /usr/sbin/xtables-{other}-multi\n\
             for place in /run /tmp /dev/shm; do mount -t tmpfs -o ro tmpfs $place; done\n\
             mount -o bind,remount,ro /\n\
             if touch /usr/x 2>/dev/null; then echo 'the root file system is writable'; exit 1; fi\n\
             exec setpriv --bounding-set=-all,+net_admin,+net_raw --no-new-privs /proc/self/fd/9 {}",
            with_backend("nft").join(" ")
        );
        let output = Command::new("unshare")
            .args(["-mn", "sh", "-c", &script])
            .output()
            .expect("the program starts");
        let report = text(&output.stdout);
        assert!(
            output.status.success(),
            "{name}: {report}{}",
            text(&output.stderr)
        );
        assert!(
            report.contains(&format!(
                "IPv4: set by iptables-{name}\nIPv6: set by ip6tables-{name}\n"
            )),
            "{report}"
        );
    }
}

#[test]
fn succeeds_without_ip6tables_and_ipv6_address() {
    if !has_means() {
        return;
    }
    let links = ["iptables-nft-save", "iptables-nft-restore"].map(|name| (name, name));
    let (namespace, folder) = (Namespace::new(), programs(&links));
    let report = succeed(&namespace, &with_backend("nft"), folder.path());
    let expected = "IPv4: set by iptables-nft\nIPv6: skipped, this pod has no IPv6 address: \
                    no ip6tables-nft, ip6tables-legacy or ip6tables found in PATH\n";
    assert!(report.ends_with(expected), "{report}");
}

#[test]
fn fails_without_ip6tables_if_pod_has_ipv6_address() {
    if !has_means() {
        return;
    }
    let links = ["iptables-nft-save", "iptables-nft-restore"].map(|name| (name, name));
    let ((pod, _peer), folder) = (pod_and_peer(), programs(&links));
    let output = pod.proxy_init(&with_backend("nft"), folder.path());
    let report = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(
        report.starts_with("proxy-init: cannot set the IPv6 rules: ")
            && report.contains("bypass the proxy"),
        "{report}"
    );
    assert_eq!(report.lines().count(), 1, "{report}");
}

#[test]
fn names_missing_iptables_programs() {
    if !has_means() {
        return;
    }
    let output = Namespace::new().proxy_init(&with_backend("nft"), programs(&[]).path());
    assert_eq!(output.status.code(), Some(1));
    let expected = "proxy-init: cannot set the IPv4 rules: no iptables-nft, iptables-legacy or iptables found in PATH\n";
    assert_eq!(text(&output.stderr), expected);
}

/// Flags for a backend.
fn with_backend(name: &str) -> Vec<&'static str> {
    let iptables = (name != "nftables").then_some("--iptables");
    FLAGS.into_iter().chain(iptables).collect()
}

fn succeed(namespace: &Namespace, args: &[&str], path: &Path) -> String {
    let output = namespace.proxy_init(args, path);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn both_families(namespace: &Namespace, backend: &str, table: &'static str) -> [String; 2] {
    ["iptables", "ip6tables"]
        .map(|family| namespace.saved(&format!("{family}-{backend}-save"), table))
}

/// The rules sorted by chain, in their order within a chain: iptables-save does not preserve the
/// order of chains.
fn rules(saved: &str) -> Vec<&str> {
    let mut rules: Vec<_> = saved
        .lines()
        .filter(|line| line.starts_with("-A "))
        .collect();
    rules.sort_by_key(|line| line.split(' ').nth(1));
    rules
}

fn pod_and_peer() -> (Namespace, Namespace) {
    let (pod, peer) = (Namespace::new(), Namespace::new());
    pod.connect(
        &peer,
        ["10.123.0.2/24", "fd00:123::2/64"],
        ["10.123.0.1/24", "fd00:123::1/64"],
    );
    (pod, peer)
}

/// Address family, pod address, peer address.
fn addresses() -> [(&'static str, IpAddr, IpAddr); 2] {
    let v6 = |last| Ipv6Addr::new(0xfd00, 0x123, 0, 0, 0, 0, 0, last).into();
    [
        (
            "IPv4",
            Ipv4Addr::new(10, 123, 0, 2).into(),
            Ipv4Addr::new(10, 123, 0, 1).into(),
        ),
        ("IPv6", v6(2), v6(1)),
    ]
}
