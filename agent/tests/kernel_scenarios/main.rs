//! Every scenario with real packets, in every mode: each is a trial of its own, so one line of the result says what works
//! in which mode. A mode is one arm in [`Mode::play`].

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../support/mod.rs"]
mod support;

mod play;

use libtest_mimic::{Arguments, Failed, Trial};
use pointsman_agent::iptables::Flavour;
use pointsman_crds::settings;

use support::lab::Lab;
use support::scenario::{self, Scenario};
use support::world::{Way, World};

/// What the scenarios run against.
#[derive(Clone, Copy)]
enum Mode {
    Iptables(Flavour),
}

impl Mode {
    const ALL: [Self; 2] = [Self::Iptables(Flavour::Nft), Self::Iptables(Flavour::Legacy)];

    fn name(self) -> String {
        match self {
            Self::Iptables(flavour) => format!("iptables-{flavour}"),
        }
    }

    fn play(self, lab: &Lab, scenario: &Scenario) -> Vec<String> {
        match self {
            Self::Iptables(flavour) => {
                let world = World::over(Way::Iptables(flavour).open(lab));
                play::play(lab, world, scenario, settings::Mode::Iptables)
            }
        }
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for path in scenario::files() {
        let scenario = Scenario::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let scenario: &'static Scenario = Box::leak(Box::new(scenario));
        for mode in Mode::ALL {
            let name = format!("{}::{}", scenario.name.replace('-', "_"), mode.name().replace('-', "_"));
            trials.push(Trial::test(name, move || {
                let Some(lab) = Lab::new() else { return Ok(()) };
                let wrong = mode.play(&lab, scenario);
                if wrong.is_empty() { Ok(()) } else { Err(Failed::from(wrong.join("\n"))) }
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}
