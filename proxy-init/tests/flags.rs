//! Flags of proxy-init, tested as a process without privileges.

use std::process::{Command, Output};

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

#[test]
fn dry_run_prints_rules_of_both_families() {
    let dry_run = [
        "--skip-inbound-ports",
        "25,9000-9100",
        "--skip-outbound-ports",
        "3306",
        "--dry-run",
    ];
    let output = run(&[&FLAGS[..], &dry_run].concat());
    assert!(output.status.success());
    let expected = include_str!("golden/nftables.rules");
    assert_eq!(String::from_utf8(output.stdout).expect("UTF-8"), expected);

    let output = run(&[&FLAGS[..], &dry_run, &["--iptables"]].concat());
    assert!(output.status.success());
    let (ipv4, ipv6) = (
        include_str!("golden/ipv4.rules"),
        include_str!("golden/ipv6.rules"),
    );
    let expected = format!(
        "# IPv4, for iptables-restore --noflush\n{ipv4}# IPv6, for ip6tables-restore --noflush\n{ipv6}"
    );
    assert_eq!(String::from_utf8(output.stdout).expect("UTF-8"), expected);
}

#[test]
fn rejects_invalid_flags_with_exit_code_2() {
    for (args, expected) in [
        (["--skip-inbound-ports", "1,b,c"], "\"b\" is neither"),
        (["--inbound-port", "x"], "'x' for '--inbound-port"),
        (["--outbound-port", "5000"], "--admin-port <PORT>"),
        (["--no-such-flag", "--dry-run"], "--no-such-flag"),
    ] {
        let output = run(&args);
        assert_eq!((output.status.code(), output.stdout), (Some(2), Vec::new()));
        let report = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(report.contains(expected), "{expected}: {report}");
    }
}

#[test]
fn prints_help_and_version() {
    let help = String::from_utf8(run(&["--help"]).stdout).expect("UTF-8");
    assert!(help.contains("UDP never passes the proxy"), "{help}");
    let version = String::from_utf8(run(&["--version"]).stdout).expect("UTF-8");
    assert_eq!(
        version,
        format!("proxy-init {}\n", env!("CARGO_PKG_VERSION"))
    );
}

/// Runs proxy-init with an empty search path: no test here needs iptables.
fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_proxy-init"))
        .args(args)
        .env_clear()
        .env("PATH", "/nonexistent")
        .output()
        .expect("proxy-init starts")
}
