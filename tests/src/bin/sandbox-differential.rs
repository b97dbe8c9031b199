//! The two ends of the differential test: `sandbox-differential serve SEED OMITTED` and
//! `sandbox-differential compare SEED OMITTED HOST FIRST..END`, which exits with 1 after a
//! difference. OMITTED are the names of the fields that may differ, `PART:NAME,...`. FIRST and
//! END select connections by their numbers.

use std::env;
use std::process::ExitCode;

use diy_mesh_tests::differential::{Omitted, client, server};
use tokio::runtime::Builder;
use tokio::task::LocalSet;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [command, seed, omitted, rest @ ..] = &arguments[..] else {
        return usage();
    };
    let (Ok(seed), Some(omitted)) = (seed.parse(), Omitted::parse(omitted)) else {
        return usage();
    };
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the runtime starts");
    let local = LocalSet::new();
    match (*command, rest) {
        ("serve", []) => match local.block_on(&runtime, server::serve(seed, omitted)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("sandbox-differential: {error}");
                ExitCode::FAILURE
            }
        },
        ("compare", [host, connections]) => {
            let numbers = connections
                .split_once("..")
                .map(|(first, end)| (first.parse(), end.parse()));
            let Some((Ok(first), Ok(end))) = numbers else {
                return usage();
            };
            let server = (*host).to_owned();
            let client = client::Client {
                server,
                seed,
                omitted,
            };
            let equal = local.block_on(&runtime, client::compare(client, first..end));
            ExitCode::from(u8::from(!equal))
        }
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    eprintln!(
        "usage: sandbox-differential serve SEED OMITTED | compare SEED OMITTED HOST FIRST..END"
    );
    ExitCode::from(2)
}
