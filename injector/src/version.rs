//! Versions of Kubernetes and of other releases. Pure.

/// The first version of Kubernetes whose nodes enable native sidecars by default.
pub const MIN_VERSION: (u32, u32) = (1, 29);

/// Whether a version such as `v1.28.3+k3s1` or `1.29+` is below `minimum`. An invalid version is
/// not.
pub fn is_below(version: &str, minimum: (u32, u32)) -> bool {
    matches!(numbers(version)[..], [major, minor, ..] if (major, minor) < minimum)
}

/// Major, minor and patch version of `v1.2.3`, as far as the version has them.
pub fn numbers(version: &str) -> Vec<u32> {
    let parts = version.trim_start_matches('v').split('.').take(3);
    let numbers = parts.map_while(|part| {
        let end = part.find(|c: char| !c.is_ascii_digit());
        part[..end.unwrap_or(part.len())].parse().ok()
    });
    numbers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_versions_of_clouds_and_distributions() {
        for version in ["v1.28.15", "1.28+", "v1.9.0", "0.5"] {
            assert!(is_below(version, MIN_VERSION), "{version}");
        }
        for version in [
            "v1.29.0",
            "1.34",
            "1.34+",
            "v2.0.0",
            "v1.30.1+k3s1",
            "",
            "dev",
        ] {
            assert!(!is_below(version, MIN_VERSION), "{version}");
        }
        assert_eq!(numbers("v0.2.3-rc.1"), [0, 2, 3]);
        assert_eq!(numbers("1.5"), [1, 5]);
        assert!(numbers("sha256:00").is_empty());
    }
}
