use proptest::prelude::*;

use super::*;

impl Bounded for u8 {
    const LEAST: Self = 0;
    const GREATEST: Self = u8::MAX;
}

type Sample = Tree<u8, u32>;

fn root(length: u8, bits: u128) -> Block {
    Block { bits, length }
}

/// Depth, how many rules a packet for a value meets at most, and the captures of the leaf it ends in.
fn walk(tree: &Sample, value: u128) -> (usize, usize, Vec<u32>) {
    let (mut block, mut depth, mut rules) = (tree.root(), 1, 0);
    loop {
        match tree.contents(block) {
            Contents::Captures(captures) => {
                return (depth, rules + captures.len(), captures.into_iter().copied().collect());
            }
            Contents::Blocks(blocks) => {
                let Some(index) = blocks.iter().position(|b| tree.holds(*b, value)) else {
                    return (depth, rules + blocks.len(), Vec::new());
                };
                rules += index + 1;
                block = blocks[index];
                depth += 1;
            }
        }
    }
}

fn check(tree: &Sample) {
    let mut reached = BTreeSet::from([tree.root()]);
    let mut captures = 0;
    for block in tree.blocks() {
        match tree.contents(block) {
            Contents::Captures(found) => captures += found.len(),
            Contents::Blocks(blocks) => {
                assert!(blocks.len() <= 8, "an inner block has at most eight children");
                assert!(block == tree.root() || blocks.len() >= 2, "{block:?} decides nothing");
                for pair in blocks.windows(2) {
                    assert!(tree.last(pair[0]) < pair[1].bits, "disjoint");
                }
                for child in blocks {
                    assert!(tree.holds(block, child.bits) && child.length > block.length);
                    assert!(reached.insert(child), "one parent");
                }
                assert!(tree.range(block).count() > MERGE, "{block:?} should be a leaf");
            }
        }
    }
    assert_eq!(reached, tree.blocks().collect());
    assert_eq!(captures, tree.captures.len(), "every capture is in exactly one leaf");
    for ((value, _), capture) in &tree.captures {
        let (depth, _, found) = walk(tree, *value);
        assert!(found.contains(capture));
        assert!(depth <= DEPTH);
        let same = tree.captures.range((*value, 0)..=(*value, u8::MAX)).count();
        assert!(
            depth == DEPTH || found.len() <= SPLIT.max(same),
            "{} captures at depth {depth}",
            found.len()
        );
    }
}

/// What the kernel holds, followed by what was touched only.
fn follow(kernel: &mut BTreeMap<Block, String>, tree: &Sample, touched: &Touched) {
    for block in &touched.removed {
        kernel.remove(block);
    }
    for block in &touched.written {
        kernel.insert(*block, format!("{:?}", tree.contents(*block)));
    }
    let all = tree.blocks().map(|block| (block, format!("{:?}", tree.contents(block)))).collect();
    assert_eq!(*kernel, all);
}

fn exercise(width: u8, start: Block, steps: &[(u128, u8, bool)]) {
    let mut tree = Sample::new(width, start);
    let mut kernel = BTreeMap::from([(start, format!("{:?}", tree.contents(start)))]);
    for (number, (value, key, add)) in steps.iter().enumerate() {
        let value = start.bits | (value & low_bits(width - start.length));
        let mut touched = Touched::default();
        if *add {
            tree.insert(value, *key, u32::try_from(number).unwrap(), &mut touched);
        } else {
            tree.remove(value, *key, &mut touched);
        }
        follow(&mut kernel, &tree, &touched);
    }
    check(&tree);
    check(&Sample::build(width, start, tree.captures.clone()));
    let mut touched = Touched::default();
    for (value, key) in tree.captures.keys().copied().collect::<Vec<_>>() {
        tree.remove(value, key, &mut touched);
    }
    assert_eq!(tree.blocks().collect::<Vec<_>>(), [start], "an empty tree is one empty block");
}

/// Values that share many bits, so that splits, skips and merges all happen.
fn steps(bits: u8) -> impl Strategy<Value = Vec<(u128, u8, bool)>> {
    let value = prop_oneof![
        0..=low_bits(bits.min(6)),
        (0..=3u128, 0..=63u128).prop_map(move |(high, low)| (high << (bits - 2)) | low),
        any::<u128>(),
    ];
    proptest::collection::vec((value, 0..3u8, prop::bool::weighted(0.7)), 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_order_of_changes_keeps_the_tree_sound_for_ipv4(steps in steps(20)) {
        exercise(32, root(12, 0x0a60_0000), &steps);
    }

    #[test]
    fn any_order_of_changes_keeps_the_tree_sound_for_all_of_ipv4(steps in steps(32)) {
        exercise(32, root(0, 0), &steps);
    }

    #[test]
    fn any_order_of_changes_keeps_the_tree_sound_for_ipv6(steps in steps(128)) {
        exercise(128, root(0, 0), &steps);
    }

    #[test]
    fn any_order_of_changes_keeps_the_tree_sound_for_ports(steps in steps(16)) {
        exercise(16, root(0, 0), &steps);
    }
}

fn worst(tree: &Sample) -> usize {
    tree.captures.keys().map(|(value, _)| walk(tree, *value).1).max().unwrap()
}

#[test]
fn no_packet_walks_more_than_44_rules_at_30_000_services() {
    // A fixed sequence that spreads like the API server's random allocation.
    let mut state = 1u64;
    let mut captures = BTreeMap::new();
    while captures.len() < 30_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        captures.insert((0x0a60_0000 | u128::from(state >> 44), 0), 0);
    }
    let tree = Sample::build(32, root(12, 0x0a60_0000), captures);
    check(&tree);
    assert!(worst(&tree) <= 44, "{}", worst(&tree));
}

#[test]
fn all_node_ports_need_at_most_36_rules() {
    let captures = (30_000..=32_767u128).map(|port| ((port, 0), 0)).collect();
    let tree = Sample::build(16, root(0, 0), captures);
    check(&tree);
    assert!(worst(&tree) <= 36, "{}", worst(&tree));
}

#[test]
fn addresses_that_share_many_bits_stay_within_the_depth_that_the_kernel_takes() {
    let captures = (1..=2_000u128).map(|low| ((0xfd00 << 112 | low, 0), 0)).collect();
    let tree = Sample::build(128, root(0, 0), captures);
    check(&tree);
    let (depth, rules, _) = walk(&tree, 0xfd00 << 112 | 0x7cf);
    assert!(depth <= 6 && rules <= 36, "depth {depth}, {rules} rules");
}
