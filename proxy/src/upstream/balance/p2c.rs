//! Power of two choices: selects the better of two random endpoints. Pure: the caller passes the
//! RNG and the comparison.
//!
//! Two choices are exponentially better than one, and a third choice adds little: M. Mitzenmacher,
//! "The Power of Two Choices in Randomized Load Balancing" (IEEE TPDS 12(10), 2001).

use fastrand::Rng;

/// The maximum number of random draws for one usable index, before a linear search.
const MAX_DRAWS: usize = 8;

/// Draws two usable indexes of `0..count` at random, and returns the second if it is cheaper than
/// the first, else the first. `None` if no index is usable. Takes constant time while most indexes
/// are usable, and never allocates.
pub(super) fn choose(
    count: usize,
    rng: &mut Rng,
    usable: impl Fn(usize) -> bool,
    is_cheaper: impl Fn(usize, usize) -> bool,
) -> Option<usize> {
    let first = draw(count, rng, &usable)?;
    let Some(second) = draw(count, rng, |index| index != first && usable(index)) else {
        return Some(first);
    };
    Some(if is_cheaper(second, first) {
        second
    } else {
        first
    })
}

fn draw(count: usize, rng: &mut Rng, usable: impl Fn(usize) -> bool) -> Option<usize> {
    if count == 0 {
        return None;
    }
    let drawn = (0..MAX_DRAWS)
        .map(|_| rng.usize(..count))
        .find(|index| usable(*index));
    drawn.or_else(|| {
        let start = rng.usize(..count);
        (start..count).chain(0..start).find(|index| usable(*index))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn equal_cost(_: usize, _: usize) -> bool {
        false
    }

    fn counts(
        count: usize,
        picks: usize,
        usable: impl Fn(usize) -> bool,
        is_cheaper: impl Fn(usize, usize) -> bool,
    ) -> Vec<usize> {
        let mut rng = Rng::with_seed(7);
        let mut counts = vec![0; count];
        for _ in 0..picks {
            counts[choose(count, &mut rng, &usable, &is_cheaper).expect("one is usable")] += 1;
        }
        counts
    }

    #[test]
    fn distributes_evenly_at_equal_cost() {
        for count in counts(10, 10_000, |_| true, equal_cost) {
            assert!((900..1100).contains(&count), "{count}");
        }
    }

    #[test]
    fn distributes_by_rank_of_cost() {
        let counts = counts(4, 12_000, |_| true, |one, other| one < other);
        // The cheapest of 4 wins 3 of the 6 pairs, the next one 2, the next one 1, the most
        // expensive one none.
        for (count, expected) in counts.into_iter().zip([6000_usize, 4000, 2000, 0]) {
            assert!(
                count.abs_diff(expected) < 300,
                "{count}, expected {expected}"
            );
        }
    }

    #[test]
    fn distributes_evenly_among_usable_only() {
        let counts = counts(10, 9_000, |index| index % 3 == 0, equal_cost);
        for (index, count) in counts.into_iter().enumerate() {
            if index % 3 == 0 {
                assert!((1900..2600).contains(&count), "{count}")
            } else {
                assert_eq!(count, 0)
            }
        }
    }

    #[test]
    fn finds_single_usable_index() {
        assert_eq!(counts(1000, 50, |index| index == 617, equal_cost)[617], 50);
    }

    #[test]
    fn returns_none_without_usable_index() {
        let mut rng = Rng::with_seed(7);
        assert_eq!(choose(0, &mut rng, |_| true, equal_cost), None);
        assert_eq!(choose(5, &mut rng, |_| false, equal_cost), None);
        assert_eq!(choose(1, &mut rng, |_| true, equal_cost), Some(0));
    }
}
