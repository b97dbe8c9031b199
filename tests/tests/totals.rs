//! The totals that `make test` prints after the output of cargo.

use std::process::{Command, Output};

use diy_mesh_tests::repository::root;

const TWO_FAILURES: &str = "     Running unittests src/lib.rs (target/debug/deps/shop_cart-12ab)
test cart::adds ... FAILED
test cart::removes ... ok
test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out
\u{1b}[1m\u{1b}[92m     Running\u{1b}[0m tests/crash.rs (target/debug/deps/crash-0f0f)
     Running tests/prices.rs (/elsewhere/debug/deps/prices-34cd)
test result: ok. 30 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out
error: 2 targets failed:";

#[test]
fn totals_count_all_programs_and_name_failures() {
    let output = totals(&format!("printf '%s\\n' '{TWO_FAILURES}'; exit 101"));
    assert_eq!(output.status.code(), Some(101));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        format!(
            "{TWO_FAILURES}\n\ntests: 31 passed, 1 failed, 3 ignored; failed: shop_cart: cart::adds, \
             crash (no result)\n"
        )
    );
}

#[test]
fn totals_of_passed_tests_name_none() {
    let output = totals("echo 'test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured' >&2");
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.ends_with("\ntests: 4 passed, 0 failed, 1 ignored\n"),
        "{text}"
    );
}

#[test]
fn totals_report_command_without_tests() {
    let output = totals("echo 'error: could not compile'; exit 101");
    assert_eq!(output.status.code(), Some(101));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.ends_with("0 ignored; failed: the command, with exit code 101\n"),
        "{text}"
    );
}

fn totals(command: &str) -> Output {
    Command::new(root().join(".ci/totals"))
        .args(["sh", "-c", command])
        .output()
        .expect("bash is installed")
}
